"""Decode a prompt and write what happened in every round, for `python -m ddtree.trace` to draw.

    python -m ddtree.server.rounds --tiny "Count from 3 to 20." --chat > rounds.json
    python -m ddtree.trace rounds.json --round 2 --svg round.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree.server.options import add_model_options, load, refusal

if TYPE_CHECKING:
    from ddtree.server.engine import Engine, Request
    from ddtree.trace import Round


def rounds(engine: Engine, request: Request) -> Iterator[Round]:
    """Yield each round of a generation as `ddtree.trace` draws it, tokens as text. Raises ContextTooLong."""
    from ddtree.trace import Round

    def text(ids: Sequence[int]) -> str:
        decoded: str = engine.tokenizer.decode(list(ids))
        return decoded

    generation = engine.start(request)
    while generation.finish_reason is None:
        before = text([*request.prompt, *generation.tokens[:-1]])
        one = engine.step(generation)
        texts = tuple(text([token]) for token in one.tree.token_ids)
        yield Round.of(one.tree, one.walk, texts, text([one.walk.tokens[-1]]), before[-200:])


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m ddtree.server.rounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("prompt", help="text to continue, or with --chat a message to answer")
    p.add_argument("--chat", action="store_true", help="put the prompt through the model's chat template")
    p.add_argument("--max-tokens", type=int, default=48)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, metavar="FILE", help="write here instead of to standard output")
    add_model_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Write the rounds as a JSON list, one a line; return the exit code."""
    args = parser().parse_args(argv)

    from ddtree.sampling import Sampling
    from ddtree.server.engine import Request
    from ddtree.server.errors import ModelError, ServerError
    from ddtree.server.protocol import ChatRequest, Message, chat_prompt

    try:
        engine = load(args)
        if args.chat:
            ids = chat_prompt(ChatRequest(messages=[Message(role="user", content=args.prompt)]), engine.tokenizer)
        else:
            ids = engine.tokenizer.encode(args.prompt)
        request = Request(tuple(ids), args.max_tokens, Sampling(args.temperature), args.seed)
        lines = [one.to_json() for one in rounds(engine, request)]
    except (ServerError, ValueError) as error:
        print(refusal(str(error), error.mend if isinstance(error, ModelError) else ""), file=sys.stderr)
        return 2
    text = "[\n" + ",\n".join(lines) + "\n]\n"
    if args.out:
        args.out.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
