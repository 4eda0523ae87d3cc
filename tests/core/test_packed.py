"""Objects that travel compressed arrive as themselves, or not at all."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import pytest
import zstandard

from ddtree_deploy import upkeep
from ddtree_deploy.agent import frames, objects, zstd
from ddtree_deploy.agent.landing import Landing
from ddtree_deploy.store import Store


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def landed(tmp_path: Path, items: list[tuple[str, int]], files: dict[str, bytes], packed: dict[str, int]) -> Landing:
    """Send through a pipe that is a file, and receive into a directory."""
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    wire = tmp_path / "wire"
    with wire.open("wb") as sink:
        for batch in objects.batches(items, packed):
            objects.send_batch(batch, {"op": "objects"}, lambda item: os.open(tmp_path / item[0], os.O_RDONLY), sink.write, None, packed)
    (tmp_path / "in").mkdir()
    landing = Landing(os.fspath(tmp_path / "in"), dict(items))
    with wire.open("rb") as source:
        reader = frames.Reader(source.readinto)
        while True:
            try:
                header, _size = reader.header()
            except frames.Closed:
                return landing
            landing.receive(reader, header)


@pytest.mark.skipif(not zstd.available(), reason="no libzstd.so.1: install libzstd1")
def test_small_large_and_raw_objects_arrive_together(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(400_000)
    contents = [b"x = 1\n" * 5000, noise + bytes(3_000_000), b"", noise[:1000]]
    items = [(digest(data), len(data)) for data in contents]
    squeezed = {digest(data): zstandard.compress(data, 3) for data in contents[:2]}
    files = {digest(data): squeezed.get(digest(data), data) for data in contents}
    landing = landed(tmp_path, items, files, {name: len(data) for name, data in squeezed.items()})
    assert (landing.received, landing.bad, landing.error) == (4, [], None)
    for data in contents:
        assert (tmp_path / "in" / digest(data)).read_bytes() == data


@pytest.mark.skipif(not zstd.available(), reason="no libzstd.so.1: install libzstd1")
@pytest.mark.parametrize("harm", ["flip", "cut", "rubbish", "bomb"])
def test_a_damaged_stream_is_bad_and_the_next_object_still_arrives(tmp_path: Path, harm: str) -> None:
    data, after = b"print('hello')\n" * 40_000, b"after"
    stream = bytearray(zstandard.compress(data if harm != "bomb" else data * 50, 3))
    if harm == "flip":
        stream[len(stream) // 2] ^= 16
    elif harm == "cut":
        stream = stream[:-7]
    elif harm == "rubbish":
        stream = bytearray(random.Random(2).randbytes(5000))
    items = [(digest(data), len(data)), (digest(after), len(after))]
    landing = landed(tmp_path, items, {digest(data): bytes(stream), digest(after): after}, {digest(data): len(stream)})
    assert landing.bad == [digest(data)]
    assert sorted(os.listdir(tmp_path / "in")) == [digest(after)]


def test_the_store_makes_twins_once_of_what_shrinks(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    text, noise = b"import os\n" * 1000, random.Random(3).randbytes(10_000)
    for data in (text, noise):
        store.path(digest(data)).parent.mkdir(exist_ok=True)
        store.path(digest(data)).write_bytes(data)
    made, raw, small = upkeep.compress(store)
    assert (made, raw) == (1, len(text)) and 0 < small < len(text) // 10
    twins = store.packed([(digest(text), len(text)), (digest(noise), len(noise))])
    assert twins == {digest(text): small}
    with os.fdopen(store.open_packed(digest(text)), "rb") as twin:
        assert zstandard.ZstdDecompressor().decompress(twin.read(), max_output_size=len(text)) == text
    assert upkeep.compress(store) == (0, 0, 0)
    upkeep.prune(store)
    assert not store.packed_path(digest(text)).exists()
