"""The engine: draft, verify, walk, commit. Plain decoding, a DFlash chain and DDTree differ only in the tree verified.

A round starts with one committed token that the target has not read yet: the root. The drafter proposes what may
follow, the target reads root and tree in one pass, the walk follows the target's own choices through the tree, and the
cache keeps the rows of the path. The last choice has no row yet and is the next root.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ddtree.sampling import GREEDY, Sampling, sample_token
from ddtree.server.cache import compact
from ddtree.server.drafter import ContextCache, Drafter
from ddtree.server.errors import ContextTooLong, ModelError
from ddtree.server.target import Target
from ddtree.server.text import Decoder, StopText
from ddtree.topk import topk_logprobs
from ddtree.tree import Tree, build_tree
from ddtree.walk import Walk, greedy_walk, sample_walk, stop_walk

PREFILL_CHUNK = 2048


class Mode(StrEnum):
    """How the next tokens are proposed."""

    PLAIN = "plain"
    DFLASH = "dflash"
    DDTREE = "ddtree"


@dataclass(frozen=True)
class Request:
    """One generation. `seed` and the absolute position decide all randomness."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass
class Stats:
    """Counts of one generation; `drafted` and `accepted` count draft tokens, so neither roots nor bonus tokens."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0  # by rounds, so without the token that the prefill gives

    @property
    def acceptance_length(self) -> float:
        """Return the tokens emitted per verify pass; plain decoding has 1.0."""
        return self.emitted / self.rounds if self.rounds else 1.0


@dataclass(frozen=True)
class Round:
    """What one round did: where its root stood, the tree, the walk through it, the target's logits after each node."""

    root_position: int
    tree: Tree
    walk: Walk
    logits: Tensor


@dataclass
class Generation:
    """The state of one request between rounds."""

    request: Request
    cache: Any
    context: ContextCache | None
    decoder: Decoder
    stop_text: StopText
    limit: int  # tokens that may be emitted, by the request and by the context
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: Stats = field(default_factory=Stats)
    _text: str = ""

    def take_text(self) -> str:
        """Return the text that became certain since the last call."""
        text, self._text = self._text, ""
        return text

    def emit(self, token: int, end: bool) -> bool:
        """Append one token, its text unless it is an end token, and say whether a stop string is complete now."""
        self.tokens.append(token)
        if not end:
            self._text += self.stop_text.feed(self.decoder.feed(token))
        if end or self.stop_text.found is not None:
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: str) -> None:
        """End the generation, giving out the text held back for a stop string that did not come."""
        self.finish_reason = reason
        if self.stop_text.found is None:
            self._text += self.stop_text.feed(self.decoder.flush())
        if self.stop_text.found is None:
            self._text += self.stop_text.flush()


class Engine:
    """Run generations round by round. Not thread-safe: one thread owns it."""

    def __init__(
        self, target: Target, drafter: Drafter | None, tokenizer: Any, mode: Mode, budget: int, mask_token: int | None
    ) -> None:
        if mode is not Mode.PLAIN and (drafter is None or mask_token is None):
            raise ModelError(f"mode `{mode}` needs a drafter and its mask token")
        if budget < 1:
            raise ModelError(f"the budget must be at least 1: {budget}")
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.mode, self.budget = mode, budget
        self.max_context = target.max_positions
        self.eos_ids = frozenset(target.eos_ids | {tokenizer.eos_token_id} - {None})
        self.mask_token = mask_token

    @torch.inference_mode()
    def start(self, request: Request) -> Generation:
        """Read the prompt and emit the first token. Raises ContextTooLong when no token fits behind it."""
        length = len(request.prompt)
        if not 0 < length < self.max_context:
            raise ContextTooLong(f"the prompt has {length} tokens, and the context is {self.max_context}")
        generation = Generation(
            request,
            self.target.new_cache(),
            ContextCache(self.drafter) if self.drafter is not None and self.mode is not Mode.PLAIN else None,
            Decoder(self.tokenizer),
            StopText(request.stop),
            min(request.max_tokens, self.max_context - length),
        )
        for begin in range(0, length, PREFILL_CHUNK):
            read = self.target.prefill(request.prompt[begin : begin + PREFILL_CHUNK], generation.cache, begin)
            if generation.context is not None and read.features is not None:
                generation.context.append(read.features)
        token = sample_token(read.logits[-1], request.sampling, request.seed, length)
        generation.emit(token, self._ends(token, request))
        return generation

    @torch.inference_mode()
    def step(self, generation: Generation) -> Round:
        """Run one round of an unfinished generation."""
        request = generation.request
        root_position = len(request.prompt) + len(generation.tokens) - 1
        tree = self.draft(generation)
        read = self.target.verify(tree, generation.cache, root_position)
        if request.sampling.temperature == 0.0:
            walk = greedy_walk(tree, read.logits.argmax(-1).tolist())
        else:
            walk = sample_walk(tree, read.logits, request.sampling, request.seed, root_position)
        walk = stop_walk(walk, () if request.ignore_eos else self.eos_ids, generation.limit - len(generation.tokens))
        for count, token in enumerate(walk.tokens, 1):
            if generation.emit(token, self._ends(token, request)):
                walk = walk.cut(count)
                break
        compact(generation.cache, root_position, walk.path, self.target.device)
        if generation.context is not None and read.features is not None:
            generation.context.append(read.features[torch.tensor(walk.path, device=self.target.device)])
        stats = generation.stats
        stats.rounds += 1
        stats.drafted += len(tree) - 1
        stats.accepted += walk.accepted
        stats.emitted += len(walk.tokens)
        return Round(root_position, tree, walk, read.logits)

    def draft(self, generation: Generation) -> Tree:
        """Propose a tree below the last token: nothing, the drafter's best chain, or its best tree."""
        root = generation.tokens[-1]
        if self.drafter is None or self.mask_token is None or generation.context is None:
            return Tree((root,), (-1,), (0,), (0.0,))
        size = self.drafter.config.block_size
        # The root's own answer takes one place, so no path needs to be deeper than the places after it.
        depth = min(size - 1, generation.limit - len(generation.tokens) - 1)
        if depth < 1:
            return Tree((root,), (-1,), (0,), (0.0,))
        block = self.block(root, size)
        hidden = generation.context.draft(self.target.embedding(block))[1 : depth + 1]
        budget = depth if self.mode is Mode.DFLASH else self.budget
        width = 1 if self.mode is Mode.DFLASH else budget
        top = topk_logprobs(self.target.head(hidden), width)
        return build_tree(top.logp, budget, token_ids=top.ids, root_token=root)

    def block(self, root: int, size: int) -> Tensor:
        """Return the drafter's input: the last committed token, then masks."""
        return torch.tensor([root] + [self.mask_token or 0] * (size - 1), device=self.target.device)

    def _ends(self, token: int, request: Request) -> bool:
        return token in self.eos_ids and not request.ignore_eos


def run(engine: Engine, request: Request) -> Generation:
    """Run one request to its end."""
    generation = engine.start(request)
    while generation.finish_reason is None:
        engine.step(generation)
    return generation
