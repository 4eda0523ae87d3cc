"""The process that outlives the connection: it waits for the confirmation of a switch, and goes back when none comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from ddtree_deploy.agent import durable, layout, switch, tidy

#: How long after the deadline a disk that refuses the decision is asked again, in seconds.
PATIENCE = 600.0

_BOOT = (
    "import sys; sys.path.insert(0, '/proc/self/fd/' + sys.argv[1]); "
    "from ddtree_deploy.agent.guardian import main; main(sys.argv[2:])"
)


def start(found: layout.Layout, tx: str, lock_fd: int, zip_fd: int, keep: int) -> subprocess.Popen[bytes]:
    """Start the guardian of the switch `tx` in its own session; it inherits the lock, and the agent's code by descriptor."""
    log = os.open(os.path.join(found.state, "guardian.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, str(zip_fd), found.venv, found.site_relative, tx, str(lock_fd), str(keep)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(zip_fd, lock_fd), start_new_session=True, cwd="/",
        )
    finally:
        os.close(log)


def watch(found: layout.Layout, tx: str, python: str) -> str | None:
    """Wait for the decision about `tx`, or make it at the deadline; return the verdict that was carried out."""
    while True:
        journal = durable.read_json(found.journal)
        if not journal or journal.get("tx") != tx:
            return switch.outcome(found, tx)
        try:
            verdict = switch.settle(found, python)
            if verdict:
                return verdict
            if time.time() >= journal["deadline"]:
                switch.decide(found, tx, "reverted", "not confirmed before the deadline")
                continue
        except OSError:
            # A full disk may get room again, and every step may be repeated; the lock says meanwhile that this is not over.
            if time.time() > journal["deadline"] + PATIENCE:
                raise
            time.sleep(0.5)
        time.sleep(0.02)


def main(argv: list[str]) -> None:
    """Run the guardian: `VENV SITE_RELATIVE TX LOCK_FD KEEP`."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    venv, site_relative, tx, lock_fd, keep = argv
    found = layout.Layout(venv, site_relative)
    python = os.path.join(venv, "bin", "python")
    verdict = watch(found, tx, python)
    if verdict == "reverted":
        for path in found.partials():
            layout.remove(path)
    os.close(int(lock_fd))
    if verdict == "confirmed":
        tidy.after_confirmation(found, int(keep))
