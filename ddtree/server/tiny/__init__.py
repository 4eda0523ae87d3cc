"""The tiny pair that ships with the project: a Qwen3 target and its DFlash drafter, made by `scripts/train_tiny.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

NAME = "ddtree-tiny"


class Pair(NamedTuple):
    """Where a target and its drafter lie."""

    target: Path
    drafter: Path


def paths() -> Pair:
    """Return the directories of the tiny target and the tiny drafter."""
    here = Path(__file__).parent
    return Pair(here / "target", here / "drafter")


def held_out_prompts() -> dict[str, list[str]]:
    """Return prompts that training never saw: `code` to continue, `chat` questions and `exercise` questions."""
    prompts: dict[str, list[str]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
    return prompts
