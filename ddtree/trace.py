"""Draw one round of DDTree: the drafted tree, its probabilities, and the path that the target accepted.

    python -m ddtree.trace ROUND.json [--svg FILE] [--nodes N]

ROUND.json is one round, or a list of rounds of which `--round` picks one, in the form of `Round.to_json`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from ddtree.tree import Tree
from ddtree.walk import Walk


@dataclass(frozen=True, slots=True)
class Round:
    """Hold what a drawing needs: parallel tuples for the nodes, root first, and the walk over them.

    `texts` are the tokens as text, `scores` path log-probabilities under the drafter, `path` the visited nodes and
    `bonus` the text of the token that the target added at the end. Raises ValueError where they do not fit together.
    """

    texts: tuple[str, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]
    bonus: str
    prompt: str = ""

    def __post_init__(self) -> None:
        if not len(self.texts) == len(self.parents) == len(self.scores) > 0:
            raise ValueError(f"a round needs a text, a parent and a score for every node: {len(self.texts)} texts")
        if any(not -1 <= parent < node for node, parent in enumerate(self.parents)) or -1 in self.parents[1:]:
            raise ValueError("a round needs every parent before its children and one root")
        steps = zip(self.path, self.path[1:], strict=False)
        if self.path[:1] != (0,) or any(self.parents[child] != parent for parent, child in steps):
            raise ValueError(f"the path does not go from parent to child: {list(self.path)}")

    @classmethod
    def of(cls, tree: Tree, walk: Walk, texts: tuple[str, ...], bonus: str, prompt: str = "") -> Round:
        """Make a round from what the library returns and the decoded tokens of the tree."""
        return cls(texts, tree.parents, tree.scores, walk.path, bonus, prompt)

    @classmethod
    def parse(cls, data: object) -> Round:
        """Read what `to_json` wrote, out of its JSON. Raises ValueError for anything else."""
        if not isinstance(data, dict) or not {"texts", "parents", "scores", "path", "bonus"} <= data.keys():
            raise ValueError("not a round: needs texts, parents, scores, path and bonus")
        lists = {name: tuple(data[name]) for name in ("texts", "parents", "scores", "path")}
        return cls(**lists, bonus=data["bonus"], prompt=data.get("prompt", ""))

    def to_json(self) -> str:
        """Return the round as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def edge(self, node: int) -> float:
        """Return the drafter's probability of the node's token at its position."""
        parent = self.parents[node]
        return 1.0 if parent < 0 else math.exp(self.scores[node] - self.scores[parent])

    def children(self) -> list[list[int]]:
        """Return the children of every node, most probable first."""
        below: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            below[parent].append(node)
        return below


def render_terminal(round: Round, *, max_nodes: int = 48) -> str:
    """Draw the tree as indented text; accepted nodes are marked `*`, and what is left out is counted.

    Nodes beyond the `max_nodes` most probable are left out, unless accepted.
    """
    below, path = round.children(), set(round.path)
    shown = path | set(range(min(max_nodes, len(round.texts))))
    lines: list[str] = []

    def draw(node: int, lead: str, joint: str) -> None:
        mark = "*" if node in path else " "
        numbers = "" if node == 0 else f"  {round.edge(node):.2f}  (path {math.exp(round.scores[node]):.3f})"
        lines.append(f"{mark} {lead}{joint}{visible(round.texts[node])}{numbers}")
        kept = [child for child in below[node] if child in shown]
        hidden = len(below[node]) - len(kept)
        inner = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[joint]
        for place, child in enumerate(kept):
            draw(child, inner, "└─ " if place == len(kept) - 1 and not hidden else "├─ ")
        if hidden:
            lines.append(f"  {inner}└─ … {hidden} more")

    draw(0, "", "")
    accepted = len(round.path) - 1
    said = " ".join([*(visible(round.texts[node]) for node in round.path[1:]), visible(round.bonus)])
    head = [f"after: …{visible(round.prompt[-60:])}"] if round.prompt else []
    return "\n".join(
        [
            *head,
            f"{len(round.texts) - 1} nodes, {accepted} accepted, {accepted + 1} tokens from one forward pass",
            f"emitted: {said}  (the last is the target's own)",
            "",
            *lines,
        ]
    )


def render_svg(round: Round, *, max_nodes: int = 40) -> str:
    """Draw the tree as a self-contained SVG: depth to the right, accepted path green, likely edges thick."""
    below, path = round.children(), set(round.path)
    shown = path | set(range(min(max_nodes, len(round.texts))))
    across, down, box = 118, 30, 88
    place: dict[int, tuple[float, float]] = {}
    next_row = 0

    def settle(node: int, depth: int) -> float:
        """Put leaves on rows of their own and every inner node on the row of its likeliest child."""
        nonlocal next_row
        rows = [settle(child, depth + 1) for child in below[node] if child in shown]
        if not rows:
            next_row += 1
        row = rows[0] if rows else next_row - 1
        place[node] = (16 + depth * across, 82 + row * down)
        return row

    settle(0, 0)
    end = place[round.path[-1]]
    bonus = (end[0] + across, end[1])
    width = max(520, *(x + box + 16 for x, _ in [*place.values(), bonus]))
    height = 82 + next_row * down
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">',
        "<style>.e{fill:none;stroke:#9aa4b2}.e.p{stroke:#1a7f37}.n{fill:#f6f8fa;stroke:#9aa4b2}"
        ".n.p{fill:#dafbe1;stroke:#1a7f37;stroke-width:1.6}.n.b{fill:#fff8c5;stroke:#9a6700;stroke-width:1.6}"
        ".q{fill:#57606a;font-size:9px}text{fill:#1f2328}</style>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="16" y="22">{escape(visible(round.prompt[-66:]))}</text>',
        f'<text x="16" y="40" class="q">{len(round.texts) - 1} nodes drafted, {len(shown) - 1} drawn; '
        f"{len(round.path) - 1} accepted (green), 1 more from the target (yellow)</text>",
        '<text x="16" y="52" class="q">numbers and widths: the drafter\'s probability at that position</text>',
    ]
    for node in sorted(shown - {0}):
        (x0, y0), (x1, y1) = place[round.parents[node]], place[node]
        bend = (x0 + box + x1) / 2
        out.append(
            f'<path class="e{" p" if node in path else ""}" stroke-width="{0.6 + 2.6 * round.edge(node):.2f}" '
            f'd="M{x0 + box:.0f} {y0:.0f}C{bend:.0f} {y0:.0f} {bend:.0f} {y1:.0f} {x1:.0f} {y1:.0f}"/>'
        )
    out.append(f'<path class="e p" stroke-dasharray="4 3" d="M{end[0] + box:.0f} {end[1]:.0f}H{bonus[0]:.0f}"/>')
    boxes = [(*place[node], "p" if node in path else "", node) for node in sorted(shown)]
    for x, y, kind, node in [*boxes, (*bonus, "b", -1)]:
        label = visible(round.bonus if node < 0 else round.texts[node])
        label = label if len(label) <= 11 else label[:10] + "…"
        out.append(f'<rect class="n {kind}" x="{x:.0f}" y="{y - 11:.0f}" width="{box}" height="22" rx="5"/>')
        out.append(f'<text x="{x + box / 2:.0f}" y="{y + 4:.0f}" text-anchor="middle">{escape(label)}</text>')
        if node > 0:
            out.append(f'<text class="q" x="{x - 3:.0f}" y="{y - 3:.0f}" text-anchor="end">{round.edge(node):.2f}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def visible(text: str) -> str:
    """Return text with white space and control characters spelled out, so that every token can be seen."""
    named = {"\n": "⏎", "\t": "⇥", "\r": "␍", " ": "␣"}
    return "".join(named.get(c, c if c.isprintable() else f"\\x{ord(c):02x}") for c in text) or "∅"


def main(argv: list[str] | None = None) -> int:
    """Draw a round from a file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ddtree.trace", description="draw one round of DDTree from its JSON")
    parser.add_argument("file", type=Path, help="a round, or a list of rounds, as JSON")
    parser.add_argument("--round", type=int, default=0, metavar="N", help="which round of a list, default 0")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write an SVG drawing here instead")
    parser.add_argument("--nodes", type=int, default=40, metavar="N", help="draw the N likeliest nodes, default 40")
    options = parser.parse_args(argv)
    try:
        data = json.loads(options.file.read_text())
        picked = Round.parse(data[options.round] if isinstance(data, list) else data)
    except (OSError, ValueError, IndexError) as error:
        print(f"error: cannot draw `{options.file}`: {error}", file=sys.stderr)
        return 2
    if options.svg:
        options.svg.write_text(render_svg(picked, max_nodes=options.nodes))
        print(f"wrote {options.svg}")
    else:
        print(render_terminal(picked, max_nodes=options.nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
