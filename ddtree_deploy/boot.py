"""How the agent gets onto a host: the shell that finds a Python there, the code that it runs first, and the zip that this reads."""

from __future__ import annotations

import functools
import io
import zipfile
from pathlib import Path

from ddtree_deploy.hosts.base import Host

# Tried in order on the host: the first that is Python 3.9 or later runs the agent.
PYTHONS = ("python3", "python3.12", "python3.11", "python3.13", "python3.10", "python3.9", "/usr/bin/python3")
SHELL = (
    'code=$1; mode=$2; shift 2; for p in "$@"; do case $p in "~/"*) p=$HOME/${p#"~/"};; esac; '
    'if command -v "$p" >/dev/null 2>&1 && "$p" -I -S -c "import sys; sys.exit(sys.version_info < (3, 9))" 2>/dev/null; '
    'then exec "$p" -I -S -c "$code" "$mode"; fi; done; echo "no python >= 3.9 among: $*" >&2; exit 127'
)
BOOT = """
import os, sys
def take(left):
    while left:
        data = os.read(0, min(left, 65536))
        if not data:
            sys.exit(3)
        left -= len(data)
        yield data
fd = os.memfd_create("ddtree-agent")
for data in take(int(b"".join(take(8)))):
    while data:
        data = data[os.write(fd, data):]
os.set_inheritable(fd, False)
sys.path.insert(0, "/proc/self/fd/%d" % fd)
from ddtree_deploy.agent.main import main
main(fd)
"""


def command(host: Host, mode: str) -> list[str]:
    """Return the command that runs the agent on `host`; it reads `shipped` first. `mode` is `rw` or `ro`, and the parts that are sent."""
    own = [host.python] if host.python else []
    venv = [f"{host.venv}/bin/python"] if host.venv else []
    return ["sh", "-c", SHELL, "sh", BOOT, mode, *own, *venv, *PYTHONS]


@functools.cache
def agent_zip(parts: tuple[str, ...] = ()) -> bytes:
    """Return the agent as a zip that Python imports from memory; the same sources always give the same bytes.

    `parts` are packages below `agent/` (`serving`) that only some commands need: their handlers join the agent's.
    """
    package = Path(__file__).parent
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        archive.writestr(zipfile.ZipInfo("ddtree_deploy/__init__.py"), b"")
        agent = package / "agent"
        for path in sorted([*agent.glob("*.py"), *(file for part in parts for file in (agent / part).glob("*.py"))]):
            info = zipfile.ZipInfo(f"ddtree_deploy/agent/{path.relative_to(agent).as_posix()}")
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def shipped(parts: tuple[str, ...] = ()) -> bytes:
    """Return what the boot code reads: the size of the agent's zip in eight digits, and the zip."""
    archive = agent_zip(parts)
    return b"%08d" % len(archive) + archive
