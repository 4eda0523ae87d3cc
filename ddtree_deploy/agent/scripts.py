"""Console scripts of a venv, made for its interpreter (packaging specification "Entry points")."""

from __future__ import annotations

import os
import re

from ddtree_deploy.agent import dists

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

MARK = "# made by ddtree-deploy for "
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z")
_TARGET = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\s*:\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\Z")
#: The venv's own, whoever claims them.
_KEPT = re.compile(r"(?:python[\d.]*t?(?:-config)?|pythonw|activate.*|deactivate.*|Activate\.ps1)\Z")
#: Linux cut a first line after 127 bytes until 5.1, and it never could hold a space.
_SHEBANG = 127


def shebang(python: str) -> str:
    """Return the first lines of a script for `python`: plain, or by /bin/sh where the path is long or has a space."""
    line = "#!%s\n" % python
    if len(os.fsencode(line)) <= _SHEBANG and not re.search(r"\s", python):
        return line
    # To sh this runs the interpreter; to Python it is a string.
    quoted = python.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
    return "#!/bin/sh\n'''exec' \"%s\" \"$0\" \"$@\"\n' '''\n" % quoted


def text_of(distribution: str, target: str, python: str) -> str | None:
    """Return a console script that calls `target` (`module:attr`), or None when that is not an entry point."""
    match = _TARGET.match(target)
    if match is None:
        return None
    module, attribute = match.groups()
    return ('%s%s%s\nimport sys\n\nfrom %s import %s\n\nif __name__ == "__main__":\n    sys.exit(%s())\n') % (
        shebang(python),
        MARK,
        distribution,
        module,
        attribute.split(".")[0],
        attribute,
    )


def _read(path: str) -> str | None:
    """Return a file's text, None when there is none, and an empty string for what is no small regular file."""
    try:
        if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) > 1 << 16:
            return "" if os.path.lexists(path) else None
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


def _is_ours(text: str) -> bool:
    return MARK in text[:4096]


def _is_generated(text: str) -> bool:
    """Tell whether an installer made this script: it only calls an entry point, as those of pip and uv do."""
    return text.startswith("#!") and "import" in text and "sys.exit(" in text and len(text.splitlines()) <= 20


def _does(text: str, target: str, python: str) -> bool:
    """Tell whether an installer's script already calls `target` by `python`."""
    match = _TARGET.match(target)
    if match is None:
        return False
    module, attribute = match.groups()
    name = attribute.split(".")[0]
    called = re.search(r"^\s*from\s+%s\s+import\s+%s\s*$" % (re.escape(module), re.escape(name)), text, re.MULTILINE)
    return text.startswith(shebang(python)) and called is not None and "sys.exit(%s())" % attribute in text


def _write(path: str, text: str) -> None:
    temporary = "%s.ddtree-%d" % (path, os.getpid())
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o755)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            file.flush()
            os.fchmod(fd, 0o755)
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def regenerate(site: str, bin_dir: str, python: str, former: Container[str] = ()) -> dict[str, list[str]]:
    """Make the console scripts in `bin_dir` those of the distributions in `site`, for the interpreter `python`.

    Written by a rename, mode 0755. Removed are only scripts that we made and that no distribution has now, and
    installers' scripts whose name is in `former` (the console scripts of the generation before). Left alone: the
    interpreter's own names, scripts that already do the same, and what somebody wrote by hand. Returns
    `{written, removed, kept}`, sorted names; `kept` are hand-made files in the place of a console script.
    """
    wanted = {}
    for dist in dists.read_distributions(site, records=False):
        for name, target in dist["scripts"]:
            if _NAME.match(name) and not _KEPT.match(name) and _TARGET.match(target):
                wanted[name] = (dist["name"], target)
    written, removed, kept = [], [], []
    os.makedirs(bin_dir, exist_ok=True)
    for name, (distribution, target) in sorted(wanted.items()):
        path = os.path.join(bin_dir, name)
        text, now = text_of(distribution, target, python), _read(path)
        if text is None:
            continue
        if now is not None and (now == text or (not _is_ours(now) and _does(now, target, python))):
            continue
        if now is not None and not _is_ours(now) and not _is_generated(now):
            kept.append(name)
            continue
        _write(path, text)
        written.append(name)
    for name in sorted(os.listdir(bin_dir)):
        if name in wanted or _KEPT.match(name):
            continue
        now = _read(os.path.join(bin_dir, name)) or ""
        if _is_ours(now) or (name in former and _is_generated(now)):
            os.unlink(os.path.join(bin_dir, name))
            removed.append(name)
    if written or removed:
        fd = os.open(bin_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    return {"written": written, "removed": removed, "kept": kept}
