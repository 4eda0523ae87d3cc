"""Tell from outside whether a running SGLang server really decodes with DDTREE, or why it does not.

SGLang swallows what a plugin raises, and a request to a server says nothing of the algorithm that answers it. So a launch
asks twice: `/server_info` (older: `/get_server_info`) for the algorithm that was resolved, and the server's log for the line
that our start-up self-test leaves. Standard library only; nothing here talks to a server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_overlay.runtime.args import NAME

READY = re.compile(r"DDTREE ready: budgets? \[?([\d, ]+)\]?, self-test passed")
#: Log lines that say why DDTREE is not there, and what to do.
CAUSES = (
    (re.compile(r"DDTREE start-up self-test failed.*"), "use `--attention-backend triton`, or leave speculation out"),
    (re.compile(r"`[^`]+` is not the file this overlay was built with"), "push the overlay again: `ddtree-deploy push HOST --overlay`"),
    (re.compile(r"is not what DDTREE was written for.*"), "use a supported version: `ddtree-deploy overlay list`"),
    (re.compile(r"DDTREE does not support.*"), "change the setting that it names"),
    (re.compile(r"(?i)unknown speculative algorithm.*ddtree.*|invalid choice: 'DDTREE'.*"), "push the overlay, or install the plugin"),
)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Whether DDTREE decodes, the budgets that it was captured with, and otherwise why not and what to do."""

    active: bool
    budgets: tuple[int, ...] = ()
    detail: str = ""
    mend: str = ""


def confirm(info: Mapping[str, Any], log: Iterable[str]) -> Confirmation:
    """Judge a server by the JSON of `/server_info` ({}: it gave none) and the lines of its log, oldest first.

    A server that was started again in one log file is judged by what it said last.
    """
    budgets: tuple[int, ...] = ()
    cause = mend = ""
    for line in log:
        ready = READY.search(line)
        if ready:
            budgets, cause, mend = tuple(int(number) for number in ready[1].split(",")), "", ""
            continue
        for pattern, what in CAUSES:
            found = pattern.search(line)
            if found:
                budgets, cause, mend = (), found[0].strip(), what
    algorithm = str(info.get("speculative_algorithm") or "none").upper()
    if cause:
        return Confirmation(False, (), cause, mend)
    if algorithm != NAME:
        return Confirmation(False, budgets, f"the server's algorithm is {algorithm}", f"start it with `--speculative-algorithm {NAME}`")
    if not budgets:
        return Confirmation(False, (), "the log has no line of the start-up self-test", "look at the whole log: `ddtree-deploy logs HOST`")
    return Confirmation(True, budgets)
