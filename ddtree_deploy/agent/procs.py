"""Which processes use files of a tree, and which SGLang servers run: from /proc (proc(5)), without stopping anybody."""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

_DELETED = " (deleted)"


#: What a process of ours has its code from (`boot.BOOT`).
AGENT = "/memfd:ddtree-agent"


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def _bytes(pid: int, name: str) -> bytes:
    with open("/proc/%d/%s" % (pid, name), "rb") as file:
        return file.read()


def _argv(pid: int) -> list[str]:
    try:
        return [os.fsdecode(part) for part in _bytes(pid, "cmdline").split(b"\0")[:-1]]
    except OSError:
        return []


def _command(pid: int) -> str:
    """Return a process's command line on one line, shortened and without secrets; its short name when there is none."""
    text = " ".join(redact(_argv(pid)))
    if not text:
        try:
            text = "[%s]" % _bytes(pid, "comm").decode("utf-8", "replace").strip()
        except OSError:
            text = "?"
    return text if len(text) <= 200 else text[:197] + "..."


def _links(pid: int) -> Iterator[tuple[str, str]]:
    """Yield `(how, path)` of what a process has open; raise PermissionError when it may not be looked at."""
    for how in ("exe", "cwd"):
        try:
            yield how, os.readlink("/proc/%d/%s" % (pid, how))
        except FileNotFoundError:
            pass  # a kernel thread, or one that just ended
    for name in os.listdir("/proc/%d/fd" % pid):
        try:
            yield "fd", os.readlink("/proc/%d/fd/%s" % (pid, name))
        except FileNotFoundError:
            pass


def _maps(pid: int, needles: list[bytes]) -> Iterator[tuple[str, str]]:
    data = _bytes(pid, "maps")
    if not any(needle in data for needle in needles):
        return
    for line in data.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6:
            yield "maps", re.sub(r"\\012", "\n", os.fsdecode(fields[5]))


def _import_path(pid: int) -> Iterator[tuple[str, str]]:
    """Yield where a process will import from later: what is pure Python is neither mapped nor kept open."""
    for variable in _bytes(pid, "environ").split(b"\0"):
        if variable.startswith(b"PYTHONPATH="):
            for path in variable[len(b"PYTHONPATH=") :].split(b":"):
                yield "path", os.fsdecode(path)


def _below(path: str, tree: str) -> bool:
    return path == tree or path.startswith((tree + "/", tree + _DELETED))


def users_of(roots: Iterable[str]) -> dict[str, Any]:
    """Return `{"users": [...], "unread": n}`: who uses files below `roots`, and how many could not be looked at.

    A user is `{pid, root, command, how, path}`, at most one for each pid, tree and `how`: `maps` (mapped, as a loaded
    library is), `fd`, `cwd`, `exe`, `path` (it stands in its PYTHONPATH). A file that was replaced under a process ends
    with ` (deleted)`. `root` is the pid of the farthest ancestor that is a user, too: the server of a worker. This
    process is left out, and so is one in a container whose directory of that name is another.
    """
    trees = sorted({os.path.realpath(root) for root in roots})
    needles = [os.fsencode(tree) for tree in trees]
    users: list[dict[str, Any]] = []
    unread = 0
    for pid in _pids():
        if pid == os.getpid():
            continue
        found: dict[tuple[str, str], str] = {}
        denied = ours = False
        for source in (_links(pid), _maps(pid, needles), _import_path(pid)):
            try:
                for how, path in source:
                    ours = ours or path.startswith(AGENT)
                    tree = next((tree for tree in trees if _below(path, tree)), None)
                    if tree is not None:
                        found.setdefault((tree, how), path)
            except PermissionError:
                denied = True
            except (FileNotFoundError, ProcessLookupError):
                pass
        unread += denied
        if ours:
            continue  # a guardian that is about to end, or what tidies generations: it goes by itself
        for (tree, how), path in found.items():
            if _sees(pid, tree):
                users.append({"pid": pid, "command": _command(pid), "how": how, "path": path})
    pids = {user["pid"] for user in users}
    for user in users:
        user["root"] = [pid for pid in _line(user["pid"]) if pid in pids][-1]
    return {"users": users, "unread": unread}


def _line(pid: int) -> list[int]:
    """Return a process and its ancestors, nearest first; as far as they are there to be seen."""
    line = [pid]
    while line[-1] > 1:
        try:
            line.append(_parent(line[-1]))
        except (OSError, ValueError):
            break
    return line


def _parent(pid: int) -> int:
    return int(_bytes(pid, "stat").rpartition(b")")[2].split()[1])


def _sees(pid: int, tree: str) -> bool:
    """Tell whether `tree` is for `pid` the directory that it is for us; a container may have its own of that name."""
    try:
        theirs = os.stat("/proc/%d/root%s" % (pid, tree))
    except PermissionError:
        return True
    except OSError:
        # Gone from both views is a deleted tree; gone from theirs alone is another mount namespace.
        return not os.path.exists(tree)
    try:
        return os.path.samestat(theirs, os.stat(tree))
    except OSError:
        return False


# --- running servers

ENVIRONMENT = ("CUDA_", "NCCL_", "SGLANG_", "TORCH_", "TRITON_", "FLASHINFER_", "LD_", "PYTHON", "OMP_")
HIDDEN = "***"
#: Words that hide a value wherever they stand in a name, and those that do as its last: `--token-map` names a file.
_ALWAYS = frozenset(
    ["secret", "secrets", "password", "passwords", "passwd", "passphrase", "credential", "credentials", "apikey"]
)
_LAST = frozenset(["key", "keys", "token", "tokens"])
_SHAPES = re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[bp]-|AKIA)[A-Za-z0-9_-]{12,}|\bBearer\s+\S+")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
_INLINE = re.compile(
    r"""([\w-]*(?:key|token|secret|passw(?:or)?d)["']?\s*[:=]\s*)(["'])(?:(?!\2).)+\2""", re.IGNORECASE
)


def is_secret(name: str, value: str = "") -> bool:
    """Tell whether a flag or variable of this name holds a secret; counts such as `--max-total-tokens 4096` do not."""
    words = [word for word in re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()) if word]
    if not words:
        return False
    if words[-1].endswith("s") and words[-1] in ("keys", "tokens") and value.strip().replace(".", "").isdigit():
        return False
    return words[-1] in _LAST or any(word in _ALWAYS for word in words) or "api-key" in "-".join(words)


def scrub(text: str) -> str:
    """Replace in a value what looks like a secret whatever its name: token shapes, passwords in URLs, JSON fields."""
    text = _USERINFO.sub(HIDDEN + "@", _SHAPES.sub(HIDDEN, text))
    return _INLINE.sub(lambda match: match.group(1) + match.group(2) + HIDDEN + match.group(2), text)


def redact(argv: list[str]) -> list[str]:
    """Return `argv` with the values of secret flags replaced by `***`: `--api-key X`, `--api-key=X`, `HF_TOKEN=X`."""
    out, hide = [], False
    for index, part in enumerate(argv):
        if hide and not (part.startswith("--") and len(part) > 2):
            out.append(HIDDEN)
            hide = False
            continue
        name, equals, value = part.partition("=")
        following = argv[index + 1] if index + 1 < len(argv) else ""
        hide = part.startswith("-") and not equals and is_secret(part, following)
        if equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name) and is_secret(name, value):
            out.append(name + "=" + HIDDEN)
        else:
            out.append(scrub(part))
    return out


def environment(items: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a server that a launch depends on, by the prefixes of `ENVIRONMENT`, without secrets."""
    return {
        name: scrub(value)
        for name, value in sorted(items.items())
        if name.startswith(ENVIRONMENT) and not is_secret(name, value)
    }


def is_server(argv: list[str]) -> bool:
    """Tell whether a command line starts an SGLang server, or the standalone one of ours."""
    for index, part in enumerate(argv[:-1]):
        if part == "-m" and argv[index + 1] in ("sglang.launch_server", "ddtree.server"):
            return True
        if os.path.basename(part) == "sglang" and argv[index + 1] == "serve":
            return True
    return any(part.endswith("sglang/launch_server.py") for part in argv[:8])


def servers(venv: str) -> list[dict[str, Any]]:
    """Return `[{pid, argv, env, cwd}]` of the servers that run from `venv`: a known-good launch, without its secrets.

    Workers that a server forks with its own command line are not servers. What may not be looked at is left out.
    """
    venv = os.path.abspath(venv)
    trees = {venv, os.path.realpath(venv)}
    found = {}
    for pid in _pids():
        argv = _argv(pid)
        if pid == os.getpid() or not is_server(argv):
            continue
        try:
            raw = _bytes(pid, "environ").split(b"\0")
            cwd = os.readlink("/proc/%d/cwd" % pid)
            parent = _parent(pid)
            env = dict(os.fsdecode(item).split("=", 1) for item in raw if b"=" in item)
            loaded = any(os.fsencode(tree) + b"/" in _bytes(pid, "maps") for tree in trees)
        except (OSError, ValueError):
            continue
        named = any(part.startswith(tree + "/") for part in argv[:2] for tree in trees)
        if loaded or named or env.get("VIRTUAL_ENV") in trees:
            found[pid] = (parent, argv, env, cwd)
    return [
        {"pid": pid, "argv": redact(argv), "env": environment(env), "cwd": cwd}
        for pid, (parent, argv, env, cwd) in found.items()
        if not (parent in found and found[parent][1] == argv)
    ]
