"""Import one module as the venv would, were `root` its site-packages; runs by `-S -c`, so it imports nothing of ours.

argv: result descriptor, pid of the parent, root, live site-packages, module, code to run after its import. The result is one
JSON object on the descriptor, never on stdout; whoever gets none knows that the import ended the process.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Iterable


def fence(parent: int) -> None:
    """No core files, a stack on stderr when a signal kills us, and no life of our own after the parent's death."""
    import faulthandler
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=True)
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL (prctl(2))
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def set_paths(root: str, live: str) -> None:
    """Do what `site` does at start-up, with `root` in the place of the live site-packages."""
    if sys.path and sys.path[0] == "":
        del sys.path[0]  # `-c` puts the working directory first
    import site

    ordinary = site.getsitepackages
    same = os.path.realpath(live)

    def getsitepackages(prefixes: Iterable[str] | None = None) -> list[str]:
        found = [root if os.path.realpath(path) == same else path for path in ordinary(prefixes)]
        return found if root in found else [root, *found]

    site.getsitepackages = getsitepackages
    site.main()
    site.getsitepackages = ordinary


def mapped() -> set[str]:
    """Return the files of which a part is mapped executable, from /proc/self/maps."""
    files = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5].startswith("/") and "x" in fields[1]:
                files.add(fields[5])
    return files


def sources() -> set[str]:
    """Return the files that the loaded modules say they come from."""
    found = set()
    for module in list(sys.modules.values()):
        try:
            path = vars(module).get("__file__")
        except TypeError:
            continue
        if isinstance(path, str) and path.startswith("/"):
            found.add(path)
    return found


def their_part(tb: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without our own frames and those of the import system that come before the module's."""
    while tb is not None and (
        "importlib" in tb.tb_frame.f_code.co_filename or tb.tb_frame.f_code.co_filename == "<string>"
    ):
        tb = tb.tb_next
    return tb


def main() -> None:
    fd, parent = int(sys.argv[1]), int(sys.argv[2])
    root, live, module, code = sys.argv[3:7]
    os.set_inheritable(fd, False)
    fence(parent)
    me = os.getpid()
    sys.argv[:] = [""]
    result: dict[str, object] = {"ok": True}
    import importlib
    import time
    import traceback

    started = time.monotonic()
    try:
        set_paths(root, live)
        started = time.monotonic()
        importlib.import_module(module)
        exec(code, {"__name__": module})
    except BaseException as error:
        said = ("%s: %s" % (type(error).__name__, error)).strip().splitlines()[0]
        why = "the import called sys.exit(%r)" % (error.code,) if isinstance(error, SystemExit) else said
        lines = traceback.format_exception(type(error), error, their_part(error.__traceback__))
        result = {"ok": False, "error": why, "traceback": "".join(lines)}
    if os.getpid() != me:
        os._exit(0)  # the import forked, and this is the copy
    result["seconds"] = time.monotonic() - started
    result["mapped"] = sorted(mapped())
    result["modules"] = sorted(sources())
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(fd, data) :]
    # No teardown: what runs at exit is not what is asked about.
    os._exit(0)


if __name__ == "__main__":
    main()
