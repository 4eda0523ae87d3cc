"""Text comes out whole: never half a character, never a part of a stop string, wherever the boundaries fall."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddtree.server.engine import Mode
from ddtree.server.text import Decoder, StopText
from tests.server.conftest import Variant

texts = st.text("ab", max_size=30)
stops = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


@given(texts, stops, st.lists(st.integers(1, 4), max_size=30))
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    ends = [(text.index(s) + len(s), text.index(s), s) for s in stops if s in text]
    _, end, first = min(ends, default=(0, len(text), None))
    stop, shown, at = StopText(stops), "", 0
    for size in [*cuts, len(text)]:
        if stop.found is None:
            shown += stop.feed(text[at : at + size])
            at += size
            assert text[:end].startswith(shown)
    if stop.found is None:
        shown += stop.flush()
    assert (shown, stop.found) == (text[:end], first)


def test_nothing_is_held_back_longer_than_needed() -> None:
    stop = StopText(["END"])
    assert [stop.feed(piece) for piece in ("a E", "N", "x", "EN", "D more")] == ["a ", "", "ENx", "", ""]
    assert stop.found == "END"
    assert StopText([""]).feed("x") == "x"


def test_characters_of_several_tokens_come_out_whole(variant: Variant) -> None:
    tokenizer = variant(Mode.PLAIN).tokenizer
    for text in ("päivää 日本語", "🙂🙂", "a\u0301b", "日", "plain"):
        ids = tokenizer.encode(text)
        decoder = Decoder(tokenizer)
        pieces = [decoder.feed(token) for token in ids]
        assert "".join(pieces) + decoder.flush() == text
        assert not any("\ufffd" in piece for piece in pieces)
    assert len(tokenizer.encode("🙂🙂")) > 2  # so that a character really spans tokens


def test_half_a_character_at_the_end_is_given_out_as_such(variant: Variant) -> None:
    tokenizer = variant(Mode.PLAIN).tokenizer
    ids = tokenizer.encode("xx Ж")
    assert len(ids) > 2
    decoder = Decoder(tokenizer)
    shown = "".join(decoder.feed(token) for token in ids[:-1])
    assert "\ufffd" not in shown and (shown + decoder.flush()).endswith("\ufffd")
