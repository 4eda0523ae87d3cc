"""One hand-made pair, loaded once a run; torch on one thread, so that tests beside these keep a core."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers

from ddtree.server.engine import Engine, Mode
from ddtree.server.load import load_engine
from tests.server.live import Live, serve
from tests.server.pair import write_pair

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()

Variant = Callable[..., Engine]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def variant(pair: tuple[Path, Path]) -> Variant:
    """Make engines of any mode and budget over one loaded pair, for use by one thread."""
    base = load_engine(str(pair[0]), str(pair[1]), device="cpu")

    def make(mode: Mode, budget: int = 24, kind: type[Engine] = Engine) -> Engine:
        return kind(base.target, base.drafter, base.tokenizer, mode, budget, base.mask_token)

    return make


@pytest.fixture(scope="package")
def live(pair: tuple[Path, Path]) -> Iterator[Live]:
    """Serve the pair, with models of its own, on a socket of this process."""
    with serve(load_engine(str(pair[0]), str(pair[1]), budget=24, device="cpu")) as server:
        yield server
