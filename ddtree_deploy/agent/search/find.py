"""Find virtual environments, conda environments and interpreters by looking at directories: bounded, and never on a network mount."""

from __future__ import annotations

import os
import shutil
import time

from ddtree_deploy.agent import facts, venvs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOTS = ("~", "/root", "/home", "/opt", "/srv", "/app", "/venv", "/venvs", "/workspace", "/data", "/mnt", "/usr/local", "/var/lib")
#: Homes are one level below /home, and a project's `.venv` one or two below that.
DEPTH = 4
MOST = 20_000
SECONDS = 15.0
_PASSED_OVER = frozenset((
    "proc", "sys", "dev", "node_modules", "__pycache__", "site-packages", "dist-packages", ".git", ".cache", ".ddtree", ".ssh", "snap",
    "docker", "containers", "containerd", "kubelet", "lxc", "include",
))  # fmt: skip
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "autofs", "virtiofs")
MINORS = range(9, 16)


def kind_of(path: str) -> str:
    """Return `venv`, `conda`, or an empty string (by PEP 405's pyvenv.cfg, or conda's own directory)."""
    if os.path.lexists(os.path.join(path, "bin", "python")):
        if os.path.isfile(os.path.join(path, "pyvenv.cfg")):
            return "venv"
        if os.path.isdir(os.path.join(path, "conda-meta")):
            return "conda"
    return ""


class Found:
    """What a search came to: `environments` (path, kind), what was `skipped`, and why it was `cut` short (or empty)."""

    def __init__(self) -> None:
        self.environments: list[tuple[str, str]] = []
        self.skipped: list[str] = []
        self.cut = ""
        self._real: set[str] = set()

    def add(self, path: str, kind: str) -> None:
        real = os.path.realpath(path)
        if real not in self._real:
            self._real.add(real)
            self.environments.append((path, kind))


def remote_mounts() -> set[str]:
    """Return where file systems are mounted that another machine serves: a look at a dead one never ends."""
    return {point for point, fs, _options in facts.mounts() if fs.startswith(_REMOTE)}


def search(own: Iterable[str], roots: Iterable[str], remote: set[str], seconds: float = SECONDS, most: int = MOST) -> Found:
    """Look at `own` (paths of environments), then below `roots` but not at `remote`, breadth first; links are not followed.

    Ends after `seconds`, or `most` directories. An environment is not searched for more inside, except conda's `envs`.
    """
    found = Found()
    for path in own:
        kind = kind_of(path)
        if kind:
            found.add(path, kind)
    deadline = time.monotonic() + seconds
    level = list(dict.fromkeys(os.path.realpath(os.path.expanduser(root)) for root in roots))
    seen: set[str] = set()
    for depth in range(DEPTH + 1):
        below: list[str] = []
        for path in level:
            if path in seen:
                continue
            seen.add(path)
            if path in remote:
                found.skipped.append(path)
                continue
            if len(seen) > most or time.monotonic() > deadline:
                found.cut = "%d directories" % most if len(seen) > most else "%.0f s" % seconds
                return found
            kind = kind_of(path)
            if kind:
                found.add(path, kind)
            if kind == "conda":
                below += [os.path.join(path, "envs", name) for name in _directories(os.path.join(path, "envs"))]
            elif not kind and depth < DEPTH:
                below += [os.path.join(path, name) for name in _directories(path)]
        level = below
    return found


def _directories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.name not in _PASSED_OVER and entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def interpreters(own: Iterable[str]) -> Iterator[str]:
    """Yield the interpreters that are no environment's: `own`, PATH, the system's, uv's, pyenv's; each real file once."""
    seen: set[str] = set()
    candidates = [*own, shutil.which("python3") or "", "/usr/bin/python3"]
    for minor in MINORS:
        candidates += venvs.interpreters("3.%d" % minor)
    for path in candidates:
        real = os.path.realpath(path)
        if path and real not in seen and os.access(real, os.X_OK) and not kind_of(os.path.dirname(os.path.dirname(path))):
            seen.add(real)
            yield path
