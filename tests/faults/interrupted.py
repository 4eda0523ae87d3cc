"""A command that the user stops: `python -m tests.faults.interrupted SIGNAL WHERE AGAIN ARGV...` runs `ddtree-deploy ARGV`.

SIGNAL (a number) comes at the first event whose text begins with WHERE; with AGAIN `twice` it comes once more while the first is
being cleaned up.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

from ddtree_deploy.cli import main
from ddtree_deploy.events import Event, Progress, Step
from ddtree_deploy.render.ui import Ui
from ddtree_deploy.session import Session


def arm(number: int, where: str, again: bool) -> None:
    """Let the signal come out of the product's own events."""
    emit, close = Ui.emit, Session.close
    came: list[bool] = []

    def stopping(ui: Ui, event: Event) -> None:
        emit(ui, event)
        text = "" if isinstance(event, Progress) else event.what if isinstance(event, Step) else event.text
        if text.startswith(where) and not came:
            came.append(True)
            signal.pthread_kill(threading.get_ident(), number)  # the kernel may choose this thread, not the main one
            if threading.current_thread() is not threading.main_thread():
                time.sleep(60)  # the main one may see it only after this one would have gone on

    def closing(session: Session, *args: Any) -> None:
        if again and came:
            os.kill(os.getpid(), signal.SIGINT)
        close(session, *args)

    setattr(Ui, "emit", stopping)  # noqa: B010 - mypy does not let a method be replaced
    setattr(Session, "close", closing)  # noqa: B010


if __name__ == "__main__":
    arm(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "twice")
    sys.argv = ["ddtree-deploy", *sys.argv[4:]]
    main()
