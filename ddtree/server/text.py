"""From tokens to text: decode as tokens come, and find stop strings wherever the token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Decoder:
    """Turn a growing list of tokens into text, piece by piece, never showing half a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # tokens before this are decoded and given out
        self._begin = 0  # decoding starts a little earlier, as a token's text can depend on the one before

    def feed(self, token: int) -> str:
        """Add a token and return the text that is now certain."""
        self._ids.append(token)
        before, after = self._decode(self._shown), self._decode(len(self._ids))
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._begin, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """Return what was held back, also when it is no whole character."""
        return self._decode(len(self._ids))[len(self._decode(self._shown)) :]

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=True)
        return text


class StopText:
    """Cut text before the first of several stop strings, holding back whatever may turn out to be one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """Add text and return what can be shown; once a stop string is complete, `found` names it."""
        text = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            _, at, self.found = min(hits)  # the first to be complete, as if the text came by the character
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
