"""Import packages, each in a process of its own, and judge what came of it: the last word on whether a tree loads."""

from __future__ import annotations

import json
import os
import pwd
import queue
import re
import select
import signal
import subprocess
import threading
import time

from ddtree_deploy.agent import probe_child
from ddtree_deploy.agent.children import cpus, has_ended, kill_group, signal_name, source_of
from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from ddtree_deploy.agent.main import Session

TRACEBACK_LINES = 30
#: Of what a child writes, its end is kept: a module that prints without end must not fill the host's memory.
_OUTPUT_KEPT = 8 << 20
#: Two of one of these in a process is a crash or a wrong answer in the end (auditwheel adds a hash to bundled ones).
_SINGLE = re.compile(r"(lib(?:cudart|cudnn\w*|nccl))(?:-[0-9a-f]{8})?\.so(?:\.(\d+))?\b")
_SITE = re.compile(r"/(?:site|dist)-packages/")


def imports(
    session: Session,
    python: str,
    root: str,
    live_site: str,
    venv: str,
    modules: list[str],
    user: str = "",
    env: dict[str, str] | None = None,
    timeout: float = 120.0,
    jobs: int | None = None,
    code: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Import each of `modules` in a process of its own, as the venv would were `root` its site-packages.

    `env` is added to a minimal environment, with paths below the live site-packages (an LD_LIBRARY_PATH, say) moved to
    `root`; as root, `user` is who imports. At most four run at a time unless `jobs` says otherwise, since an import of
    torch takes a gigabyte. `code` is Python by module, run after its import as a part of it. Returns one dict per module,
    in order, with the fields of `models.ImportProof`. Death by a
    signal, a time-out (seconds), an exit without a result, an exception, and libraries of another tree each make `ok`
    false. A read-only session leaves no bytecode behind. Raises Failure when nothing can be imported at all.
    """
    todo: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    for index, module in enumerate(modules):
        todo.put((index, module))
    how = _identity(user)
    how["env"].update((name, _moved(value, os.path.realpath(live_site), root)) for name, value in (env or {}).items())
    flags = ["-S", "-B"] if session.read_only else ["-S"]
    allow_system = _system_site(venv)
    results: dict[int, dict[str, Any]] = {}
    faults: list[Exception] = []

    def work() -> None:
        while not session.aborted() and not faults:
            try:
                index, module = todo.get_nowait()
            except queue.Empty:
                return
            try:
                proof = _import(session, [python, *flags], how, root, live_site, module, (code or {}).get(module, ""), timeout)
            except Exception as error:
                faults.append(error)
                return
            loaded = proof.pop("loaded")
            proof["foreign_libraries"] = foreign(loaded, root, live_site, venv, allow_system)
            if proof["foreign_libraries"] and proof["ok"]:
                proof["ok"] = False
                proof["error"] = "it loaded files of another tree, or one library twice"
            results[index] = proof
            session.progress("import", len(results), len(modules), "modules", module)

    workers = [threading.Thread(target=work) for _ in range(max(1, min(jobs or min(cpus(), 4), len(modules))))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    if session.aborted():
        raise Failure("interrupted", "the import proofs were stopped")
    return [results[index] for index in range(len(modules))]


def _moved(value: str, live: str, root: str) -> str:
    """Return a path list with what is below `live` moved below `root`, where it will be once `root` is live."""
    parts = []
    for part in value.split(":"):
        real = os.path.realpath(part) if part.startswith("/") else ""
        parts.append(root + real[len(live) :] if _below(real, live) else part)
    return ":".join(parts)


def _identity(user: str) -> dict[str, Any]:
    """Return the Popen arguments for who imports, where, and with which environment."""
    try:
        who = pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())
    except KeyError:
        if not user:
            raise
        mend = "name the service's user in `ddtree.toml`"
        raise Failure("usage", "the host has no user `%s`" % user, mend) from None
    how: dict[str, Any] = {
        "cwd": "/",
        "env": {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": who.pw_dir,
            "USER": who.pw_name,
            "LOGNAME": who.pw_name,
            "LANG": "C.UTF-8",
        },
    }
    if os.geteuid() == 0 and who.pw_uid != 0:
        how.update(user=who.pw_uid, group=who.pw_gid, extra_groups=os.getgrouplist(who.pw_name, who.pw_gid))
    return how


def _import(
    session: Session, interpreter: list[str], how: dict[str, Any], root: str, live_site: str, module: str, code: str, timeout: float,
) -> dict[str, Any]:
    result_out, result_in = os.pipe()
    argv = [*interpreter, "-c", source_of(probe_child), str(result_in), str(os.getpid()), root, live_site, module, code]
    started = time.monotonic()
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[result_in],
            start_new_session=True,
            **how,
        )
    except OSError as error:
        os.close(result_out)
        who = how["env"]["USER"]
        why = "`%s` can not start the interpreter `%s`: %s" % (who, interpreter[0], error.strerror)
        mend = "let the service's user read the venv and the interpreter that it links to" if "user" in how else None
        raise Failure("incompatible", why, mend) from None
    finally:
        os.close(result_in)
    assert child.stderr is not None
    stderr = child.stderr.fileno()
    outputs = {result_out: b"", stderr: b""}
    try:
        ended = _listen(session, child, outputs, started + timeout)
        if not ended and not session.aborted():
            # faulthandler answers SIGABRT with the stack; what hangs in the kernel does not answer.
            os.kill(child.pid, signal.SIGABRT)
            _listen(session, child, outputs, time.monotonic() + 1.0)
    finally:
        kill_group(child)
        os.close(result_out)
        child.stderr.close()
    seconds = time.monotonic() - started
    text = outputs[stderr].decode("utf-8", "replace")
    late = "" if ended else "no answer within %g s" % timeout
    return {"module": module, **_judge(outputs[result_out], text, child.returncode, late, seconds)}


def _listen(session: Session, child: subprocess.Popen[bytes], outputs: dict[int, bytes], deadline: float) -> bool:
    """Collect what `child` writes until it ended, which is True, or until `deadline` or an abort."""
    listening = set(outputs)
    while time.monotonic() < deadline and not session.aborted():
        ended = has_ended(child)
        # A process that the import left behind may hold the pipes: their end is not awaited.
        ready = select.select(listening, [], [], 0 if ended else 0.1 if listening else 0.02)[0]
        for fd in ready:
            data = os.read(fd, 1 << 16)
            outputs[fd] = (outputs[fd] + data)[-_OUTPUT_KEPT:]
            if not data:
                listening.discard(fd)
        if ended and not ready:
            return True
    return False


def _judge(answer: bytes, text: str, status: int, late: str, seconds: float) -> dict[str, Any]:
    try:
        result = json.loads(answer)
    except ValueError:
        result = None
    lines = text.splitlines()[-TRACEBACK_LINES:]
    proof = {"ok": False, "seconds": seconds, "error": late, "traceback": "\n".join(lines), "signal": "", "loaded": []}
    if result is not None:
        lines = result.get("traceback", "").splitlines()[-TRACEBACK_LINES:]
        proof.update(
            ok=result["ok"],
            seconds=result["seconds"],
            error=result.get("error", ""),
            traceback="\n".join(lines),
            loaded=result["mapped"] + result["modules"],
        )
    elif late:
        pass
    elif status < 0:
        proof["signal"] = signal_name(-status)
        proof["error"] = "the import died of %s" % proof["signal"]
    else:
        proof["error"] = "the process ended with status %d before the import was done" % status
    return proof


def _system_site(venv: str) -> bool:
    """Tell whether the interpreter of `venv` may use packages outside it (no pyvenv.cfg: it is no venv of its own)."""
    try:
        with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            text = file.read().lower()
    except OSError:
        return True
    return re.search(r"^include-system-site-packages\s*=\s*true\s*$", text, re.MULTILINE) is not None


def foreign(files: Iterable[str], root: str, live_site: str, venv: str, allow_system: bool = False) -> list[str]:
    """Return which loaded `files` come from another tree than `root`, and which libraries are there twice.

    Another tree is the live site-packages, another generation, or (unless `allow_system`) anybody else's site-packages.
    The CUDA runtime of the machine's toolkit is none too many beside ours of the same major: sgl_kernel loads it on purpose.
    """
    own = os.path.realpath(root)
    others = [os.path.realpath(live_site), os.path.realpath(os.path.join(venv, ".ddtree", "generations"))]
    found: list[str] = []
    single: dict[str, dict[str, str | None]] = {}
    for path in files:
        real = os.path.realpath(path[: -len(" (deleted)")] if path.endswith(" (deleted)") else path)
        match = _SINGLE.match(os.path.basename(real))
        if match:
            single.setdefault(match.group(1), {})[real] = match.group(2)
        if not _below(real, own) and (
            any(_below(real, other) for other in others) or (not allow_system and _SITE.search(real))
        ):
            found.append(path)
    twice = ["%s twice: %s" % (name, ", ".join(sorted(paths))) for name, paths in single.items() if _too_many(name, paths, own)]
    return sorted(twice) + sorted(found)


def _too_many(name: str, copies: Mapping[str, str | None], own: str) -> bool:
    """Tell whether the copies of one library (path: major) that a process loaded are too many."""
    packaged = [path for path in copies if _below(path, own) or _SITE.search(path)]
    return len(copies) > 1 and (name != "libcudart" or len(set(copies.values())) > 1 or len(packaged) > 1)


def _below(path: str, tree: str) -> bool:
    return path == tree or path.startswith(tree + "/")
