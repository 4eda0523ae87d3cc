"""The edits, one module a pinned SGLang version. Each is data: a file, an anchor, a side, and our text."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_overlay.anchors import Anchor, Where


@dataclass(frozen=True, slots=True)
class Edit:
    """Insert `text` at `where` of each node that `anchor` names in `path` (relative to site-packages)."""

    path: str
    anchor: Anchor
    where: Where
    text: str
    why: str
