"""The wire: whatever arrives, in whatever pieces, is a frame, an end, or a protocol error."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.agent import frames


def source(data: bytes, pieces: Iterator[int] | None = None) -> Callable[[memoryview], int]:
    """Return a `readinto` that gives `data` in pieces of the given sizes, then the end."""
    at = 0

    def readinto(view: memoryview) -> int:
        nonlocal at
        most = max(1, next(pieces, len(view))) if pieces else len(view)
        part = data[at : at + min(most, len(view))]
        view[: len(part)] = part
        at += len(part)
        return len(part)

    return readinto


LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8)
JSON = st.recursive(LEAVES, lambda x: st.lists(x, max_size=3), max_leaves=6)
HEADERS = st.dictionaries(st.text(max_size=6), JSON, max_size=4)


@given(st.lists(st.tuples(HEADERS, st.binary(max_size=50)), max_size=4), st.lists(st.integers(1, 9)))
def test_frames_come_back_whatever_the_pieces(sent: list[tuple[dict[str, Any], bytes]], pieces: list[int]) -> None:
    data = b"".join(frames.encode(header, len(payload)) + payload for header, payload in sent)
    reader = frames.Reader(source(data, iter(pieces)))
    for header, payload in sent:
        assert reader.header() == (header, len(payload))
        assert reader.take() == payload
    with pytest.raises(frames.Closed) as end:
        reader.header()
    assert end.value.clean


@given(HEADERS, st.binary(min_size=1, max_size=50), st.data())
def test_a_cut_is_never_a_frame(header: dict[str, Any], payload: bytes, data: st.DataObject) -> None:
    whole = frames.encode(header, len(payload)) + payload
    cut = data.draw(st.integers(1, len(whole) - 1))
    reader = frames.Reader(source(whole[:cut]))
    with pytest.raises(frames.Closed) as end:
        reader.header()
        reader.take()
    assert not end.value.clean


@given(st.binary(max_size=200))
def test_noise_is_an_end_or_a_protocol_error(noise: bytes) -> None:
    reader = frames.Reader(source(noise))
    try:
        for _ in range(100):
            reader.header()
            reader.take(1000)
    except (frames.Closed, frames.ProtocolError):
        pass


def test_a_header_that_claims_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(frames.ProtocolError, match="header of"):
        frames.Reader(source(struct.pack(">IQ", frames.MAX_HEADER + 1, 0))).header()


def test_a_payload_that_claims_too_much_is_refused_before_it_is_read() -> None:
    reader = frames.Reader(source(frames.encode({}, 1 << 60)))
    reader.header()
    with pytest.raises(frames.ProtocolError, match="payload of"):
        reader.take()


@pytest.mark.parametrize("body", [b"[]", b"3", b"nope", b"\xff", b"[" * 50_000])
def test_a_header_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.Reader(source(struct.pack(">IQ", len(body), 0) + body)).header()


def test_the_next_header_waits_for_the_payload() -> None:
    reader = frames.Reader(source(frames.encode({}, 3) + b"abc"))
    reader.header()
    with pytest.raises(frames.ProtocolError):
        reader.header()


def test_an_object_may_not_reach_beyond_its_frame() -> None:
    reader = frames.Reader(source(frames.encode({}, 3) + b"abcdef"))
    reader.header()
    with pytest.raises(frames.ProtocolError):
        reader.fill(memoryview(bytearray(4)))


@given(JSON)
def test_structured_values_survive(value: object) -> None:
    fields, payload = frames.pack(value)
    assert frames.unpack(fields, payload) == value


@given(JSON, st.data())
def test_a_flipped_bit_of_a_structured_value_is_found(value: object, data: st.DataObject) -> None:
    fields, payload = frames.pack(value)
    at = data.draw(st.integers(0, len(payload) * 8 - 1))
    damaged = bytearray(payload)
    damaged[at // 8] ^= 1 << at % 8
    with pytest.raises(frames.ProtocolError):
        frames.unpack(fields, bytes(damaged))


@pytest.mark.parametrize("payload", [b"", b"no zlib", zlib.compress(b"no json"), zlib.compress(b"[" * 100_000)])
def test_a_payload_that_is_not_ours_is_refused_although_its_digest_is_right(payload: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.unpack({"sha256": hashlib.sha256(payload).hexdigest()}, payload)


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_STRUCTURED", 1000)
    payload = zlib.compress(json.dumps("x" * 100_000).encode())
    with pytest.raises(frames.ProtocolError, match="inflates beyond"):
        frames.unpack({"sha256": hashlib.sha256(payload).hexdigest()}, payload)


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 100_000, b"\xff"])
def test_numbers_and_nestings_beyond_reason_are_refused(text: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.loads(text)


def test_more_values_than_a_tree_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three bytes of JSON make a list of 64: what is bounded is what would have to be made."""
    monkeypatch.setattr(frames, "MAX_VALUES", 100)
    assert len(frames.loads(b"[" + b"0," * 40 + b"0]")) == 41
    with pytest.raises(frames.ProtocolError, match="values"):
        frames.loads(b"[" + b"[]," * 100 + b"0]")


def test_a_byte_is_no_sign_of_life_but_a_frame_and_a_step_are() -> None:
    pulse = frames.Pulse()
    born = pulse.at
    for _ in range(1000):
        pulse.moved(1)
    assert pulse.at == born
    pulse.moved(frames.STEP)
    assert pulse.at > born
