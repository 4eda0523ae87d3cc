"""The tiny pair that ships with the project: a Qwen3 target and its DFlash drafter, made by `scripts/train_tiny.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from ddtree.server.errors import ModelError

NAME = "ddtree-tiny"


class Pair(NamedTuple):
    """Where a target and its drafter lie."""

    target: Path
    drafter: Path


def paths(*, with_drafter: bool = True) -> Pair:
    """Return the directories of the tiny target and the tiny drafter.

    Raises ModelError when the drafter is asked for and was not trained yet.
    """
    here = Path(__file__).parent
    pair = Pair(here / "target", here / "drafter")
    if with_drafter and not (pair.drafter / "model.safetensors").is_file():
        raise ModelError(
            f"the tiny pair has no trained drafter: `{pair.drafter}`",
            "make one with `scripts/train_tiny.py`, or serve the target alone with `--mode plain`",
        )
    return pair


def held_out_prompts() -> dict[str, list[str]]:
    """Return prompts that training never saw: `code` to continue, `chat` questions and `exercise` questions."""
    prompts: dict[str, list[str]] = json.loads((Path(__file__).parent / "prompts.json").read_text())
    return prompts
