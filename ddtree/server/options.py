"""The options that name a model pair, shared by the commands of this package; torch is imported only to load it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.server import tiny
from ddtree.server.errors import ModelError

if TYPE_CHECKING:
    from ddtree.server.engine import Engine


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add `--tiny`, `--model` and what belongs to them."""
    which = parser.add_argument_group("model")
    which.add_argument("--tiny", action="store_true", help="the tiny pair that comes with the project")
    which.add_argument("--model", metavar="DIR|ID", help="target: a directory or a hub id")
    which.add_argument("--drafter", metavar="DIR|ID", help="DFlash drafter: a directory or a hub id")
    which.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    which.add_argument("--dtype", default="auto", help="auto (bf16 on a GPU, fp32 on a CPU) or a torch type")
    which.add_argument("--threads", type=positive, help="CPU threads for the model (default: all cores)")
    how = parser.add_argument_group("decoding")
    how.add_argument("--mode", choices=("plain", "dflash", "ddtree"), default="ddtree")
    how.add_argument("--budget", type=positive, help="tree nodes without the root; a verify pass has one token more")


def positive(text: str) -> int:
    """Parse an option that counts something. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1: {text}")
    return int(text)


def model_name(args: argparse.Namespace) -> str:
    """Return what to call the model unless told otherwise."""
    return tiny.NAME if args.tiny else Path(args.model).name


def load(args: argparse.Namespace) -> Engine:
    """Load the pair that the options name. Raises ModelError, which has a mend where there is one."""
    if args.tiny == bool(args.model):
        raise ModelError("name a model: either `--tiny` or `--model`")
    pair = tiny.paths(with_drafter=args.mode != "plain") if args.tiny else None

    import torch
    import transformers

    from ddtree.server.engine import Mode
    from ddtree.server.load import default_budget, load_engine

    transformers.logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    model, drafter = map(str, pair) if pair else (args.model, args.drafter)
    budget = default_budget(args.device) if args.budget is None else args.budget
    return load_engine(model, drafter, mode=Mode(args.mode), budget=budget, device=args.device, dtype=args.dtype)


def refusal(message: str, mend: str = "") -> str:
    """Return an error as the commands print it."""
    return f"error: {message}" + (f"\n\nhint: {mend}" if mend else "")
