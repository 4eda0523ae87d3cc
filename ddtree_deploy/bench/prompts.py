"""What is asked when nothing else is given: prose, arithmetic, code, lists. Short, so that decoding is what is measured."""

from __future__ import annotations

import json
from pathlib import Path

from ddtree_deploy.errors import UsageProblem

DEFAULT = (
    "Count from 3 to 40, separated by commas: 3, 4, 5,",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Think step by step.\n",
    "def merge_sorted(left: list[int], right: list[int]) -> list[int]:\n",
    "Write a letter to a landlord about a broken heating.\n\nDear Mr. Brown,\n",
    "The difference between a process and a thread is",
    "List the planets of the solar system with one fact about each:\n1. Mercury:",
    "Solve 3x + 7 = 2(x + 9) for x.\n3x + 7 =",
    "class Stack:\n    def __init__(self) -> None:\n        self.items = []\n\n    def push(self",
    "Explain to a child why the sky is blue.\n",
    "SELECT name, count(*) FROM orders JOIN customers ON",
    "Once upon a time there was a clockmaker who",
    "Translate into French: The meeting was moved to Thursday, because the room is taken.\n",
    "A shop sells pens at 3 for 2 euros. What do 12 pens cost, and how many can be had for 10 euros?\n",
    "#!/bin/sh\n# Remove files older than 30 days below /var/cache/app\n",
    "The main causes of the French Revolution were",
    '{"name": "Ada", "born": 1815, "works": [',
)


def read(path: Path) -> tuple[str, ...]:
    """Return the prompts of a file: one a line, or JSON lines with a `prompt`. Raises UsageProblem when there is none."""
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageProblem(f"prompts can not be read from `{path}`: {error}") from error
    try:
        prompts = tuple(str(json.loads(line)["prompt"]) if path.suffix == ".jsonl" else line for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageProblem(f"`{path}` has a line without a prompt: {error!r}", mend='write `{"prompt": "..."}` on each line') from error
    if not prompts:
        raise UsageProblem(f"no prompt in `{path}`")
    return prompts
