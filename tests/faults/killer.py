"""Runs first inside an agent or a guardian under test: SIGKILL it at the n-th change to the file system (sys.addaudithook).

Not imported: `harness.Killer` lets the interpreter execute this text before the product's own. ROLE, CONFIG and WRAPPER are given.
"""

import json
import os
import signal
import sys

with open(CONFIG) as _file:  # noqa: F821
    _config = json.load(_file)

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = frozenset(
    ["os.rename", "os.remove", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.rmdir", "os.truncate", "os.utime",
     "tempfile.mkstemp", "subprocess.Popen", "tests.emit"]
)


def _where():
    """Return the product's lines of code on the stack, innermost first, as far as three modules out."""
    frame, out = sys._getframe(2), []
    while frame is not None and len(out) < 3:
        name = os.path.basename(frame.f_code.co_filename)
        if "ddtree_deploy" in frame.f_code.co_filename and name != "main.py" and not any(line.startswith(name) for line in out):
            out.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return "<".join(out) or "?"


def _install(kill):
    count = [0]
    seen = {}
    trace = os.open(_config["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if _config["trace"] else -1
    if trace >= 0:
        os.set_inheritable(trace, False)

    def hook(event, args):
        if event == "open":
            path, _mode, flags = args
            interesting = bool(flags & _WRITES) or _config["reads"]
            if not isinstance(path, (str, bytes)) or not interesting or os.fsdecode(path).startswith(("/dev/", "/proc/")):
                return
        elif event in _EVENTS:
            path = args[0]
        else:
            return
        count[0] += 1
        key = (event, _where())
        seen[key] = seen.get(key, 0) + 1
        if trace >= 0:
            os.write(trace, (json.dumps([count[0], key[0], key[1], seen[key], str(path)]) + "\n").encode())
        if kill and (count[0] == kill.get("at") or [*key, seen[key]] == kill.get("site")):
            with open(_config["hit"], "w") as file:
                file.write(json.dumps([count[0], *key, seen[key], str(path)]))
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _ordinal():
    """Return how many agents were started before this one (a push has two: the second confirms)."""
    fd = os.open(_config["starts"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, b".")
    number = os.fstat(fd).st_size - 1
    os.close(fd)
    return number


_name = ROLE if ROLE != "agent" else f"agent{_ordinal()}"  # noqa: F821
if ROLE == "agent":  # noqa: F821
    sys.executable = WRAPPER  # noqa: F821 - so that the guardian starts through us too
if _name == _config["role"]:
    _install(_config["kill"])
