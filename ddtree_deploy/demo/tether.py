"""End a demo, however it ends: `python -m ddtree_deploy.demo.tether MARK [DIRECTORY]`, in a session of its own.

It says where the demo may play (a new temporary directory, unless one is given), and waits for the end of its input, whose
other end nobody but the demo holds: the kernel closes it also at a SIGKILL. Then it kills what the demo started, known by the mark
in its environment (sshd overwrites its own, and is known by its configuration), and removes the directory, unless it was given.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

MARK = "DDTREE_DEMO"
GONE_SECONDS = 20.0
QUIET_LOOKS = 4


def members(mark: str, root: Path) -> list[int]:
    """Return the pids of what a demo started, but not this process (proc(5))."""
    needles = {"environ": f"{MARK}={mark}".encode(), "cmdline": os.fsencode(root / "sshd/sshd_config")}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if any(needle in (entry / file).read_bytes() for file, needle in needles.items()):
                    found.append(int(entry.name))
    return found


def end(mark: str, root: Path, remove: bool) -> None:
    """Kill a demo's processes until there are none, and remove its directory.

    None must be seen several times: a process in the middle of an exec shows no environment, and a new one may miss the listing.
    """
    deadline, quiet = time.monotonic() + GONE_SECONDS, 0
    while quiet < QUIET_LOOKS and time.monotonic() < deadline:
        left = members(mark, root)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if remove:
            shutil.rmtree(root, ignore_errors=True)
        quiet = 0 if left or (remove and root.exists()) else quiet + 1
        time.sleep(0.05)


def main() -> None:
    mark, *given = sys.argv[1:]
    root = Path(given[0] if given else tempfile.mkdtemp(prefix="ddtree-demo-"))
    try:
        with contextlib.suppress(OSError):  # a demo that is gone already
            print(root, flush=True)
        sys.stdin.buffer.read()
    finally:
        end(mark, root, not given)


if __name__ == "__main__":
    main()
