"""Decode held-out prompts with the tiny pair and draw one of the rounds: writes ddtree-round.json and .svg here.

Picks a round in which the tree helped: one that accepted tokens beyond the drafter's own best chain.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from ddtree.server import tiny  # noqa: E402
from ddtree.server.engine import Engine, Mode, Request  # noqa: E402
from ddtree.server.load import load_engine  # noqa: E402
from ddtree.trace import Round, render_svg, render_terminal  # noqa: E402


def beyond_the_chain(round: Round) -> int:
    """Count the accepted nodes that a chain of likeliest tokens would not have had."""
    below, node, chain = round.children(), 0, [0]
    while below[node]:
        node = below[node][0]
        chain.append(node)
    return sum(1 for node in round.path if node not in chain)


def varied(round: Round) -> bool:
    """Tell whether no token comes twice on the accepted path; a tiny model repeats itself often, and that is dull to look at."""
    said = [round.texts[node].strip() for node in round.path]
    return len(set(said)) == len(said)


def rounds(engine: Engine, text: str, tokens: int) -> list[Round]:
    """Decode greedily and return every round."""
    prompt = tuple(engine.tokenizer.encode(text, add_special_tokens=False))
    generation = engine.start(Request(prompt, tokens, ignore_eos=True))
    out = []
    while generation.finish_reason is None:
        before = engine.tokenizer.decode([*prompt, *generation.tokens])
        done = engine.step(generation)
        texts = tuple(engine.tokenizer.decode([token]) for token in done.tree.token_ids)
        bonus = engine.tokenizer.decode([done.walk.tokens[-1]])
        out.append(Round.of(done.tree, done.walk, texts, bonus, before))
    return out


def main() -> None:
    """Write the drawing; another pair's folders may be given as two arguments."""
    pair = tiny.Pair(*map(Path, sys.argv[1:3])) if sys.argv[2:] else tiny.paths()
    engine = load_engine(str(pair.target), str(pair.drafter), mode=Mode.DDTREE, budget=24)
    every = [round for text in tiny.held_out_prompts()["code"][:6] for round in rounds(engine, text, 32)]
    best = max(every, key=lambda round: (varied(round), min(beyond_the_chain(round), 3), len(round.path) <= 7, len(round.path)))
    (HERE / "ddtree-round.json").write_text(best.to_json() + "\n")
    (HERE / "ddtree-round.svg").write_text(render_svg(best))
    mean = sum(len(round.path) for round in every) / len(every)
    print(f"{len(every)} rounds, {mean:.2f} tokens a round; the one drawn:\n")
    print(render_terminal(best))


if __name__ == "__main__":
    main()
