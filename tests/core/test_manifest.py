"""The manifest's canonical form: stable, complete, and distrusted when it comes back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.errors import IntegrityFailure
from ddtree_deploy.manifest import SCHEMA, decode, encode, identity
from ddtree_deploy.models import Distribution, FileEntry, Finding, Manifest, ServerCapture
from tests.fixtures.trees import PYTHON, manifest

FULL = manifest(
    ("alpha", "1.0", {"alpha/__init__.py": "x", "alpha/l.py": "->__init__.py"}),
    loose={"note.txt": "n"},
    findings=(Finding("pth-code", "x.pth", "runs code"),),
    servers=(ServerCapture(("python", "-m", "sglang"), {"CUDA_HOME": "/c"}, "/"),),
    facts={"glibc": "2.39", "gpus": [{"name": "H200"}]},
)


def test_it_survives_the_round_trip_and_its_identity_is_the_digest_of_its_bytes() -> None:
    data = encode(FULL)
    assert decode(data, expect=identity(data)) == FULL
    assert encode(decode(data)) == data


def test_equal_manifests_have_equal_bytes_whatever_the_order_of_keys() -> None:
    one = manifest(facts={"a": 1, "b": 2})
    other = manifest(facts={"b": 2, "a": 1})
    assert encode(one) == encode(other)


def test_a_flipped_byte_is_found_by_the_identity() -> None:
    data = bytearray(encode(FULL))
    name = identity(bytes(data))
    data[len(data) // 2] ^= 1
    with pytest.raises(IntegrityFailure, match="does not have that digest"):
        decode(bytes(data), expect=name)


def _with_files(rows: list[Any]) -> bytes:
    document = json.loads(encode(FULL))
    document["files"] = rows
    return json.dumps(document).encode()


def _row(path: str, **changes: Any) -> list[Any]:
    row = {"path": path, "kind": "f", "mode": 0o644, "size": 1, "digest": "0" * 64, "origin": "stock", "owner": 0, **changes}
    return list(row.values())


def test_all_faults_are_told_at_once() -> None:
    rows = [
        _row("../up"), _row("/abs"), _row("ok"), _row("ok"), _row("m", mode=0o4755), _row("k", kind="b"), _row("s", size=-1),
        _row("d", digest="xyz"), _row("o", origin="mine"), _row("w", owner=7), _row("l", kind="l", digest="/etc"), ["short"],
    ]  # fmt: skip
    with pytest.raises(IntegrityFailure) as caught:
        decode(_with_files(rows))
    assert "11 faults" in caught.value.message
    assert len(caught.value.causes) == 11


def test_at_most_twenty_faults_are_listed() -> None:
    with pytest.raises(IntegrityFailure) as caught:
        decode(_with_files([_row(f"../{n}") for n in range(1000)]))
    assert "1000 faults" in caught.value.message
    assert len(caught.value.causes) == 20


@pytest.mark.parametrize("size", [True, 1.0, "1", None, 1 << 50])
def test_a_size_is_a_plain_bounded_number(size: object) -> None:
    with pytest.raises(IntegrityFailure):
        decode(_with_files([_row("a", size=size)]))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{}", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"schema":1,"files":3}'])
def test_rubbish_is_an_integrity_failure(data: bytes) -> None:
    with pytest.raises(IntegrityFailure):
        decode(data)


def test_another_schema_says_which_version_to_use() -> None:
    document = json.loads(encode(FULL))
    document["schema"] = SCHEMA + 1
    with pytest.raises(IntegrityFailure) as caught:
        decode(json.dumps(document).encode())
    assert "version" in caught.value.mend


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: st.lists(x, max_size=8) | st.dictionaries(st.text(max_size=5), x, max_size=4),
    )
)
def test_no_json_makes_it_raise_anything_else(value: object) -> None:
    document = json.loads(encode(FULL))
    for key in document:
        if key != "schema":
            try:
                decode(json.dumps({**document, key: value}).encode())
            except IntegrityFailure:
                pass


_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
_SEGMENT = st.text("abcXYZ019._-é ", min_size=1, max_size=6).filter(lambda s: s not in (".", ".."))
_PATH = st.lists(_SEGMENT, min_size=1, max_size=4).map("/".join)
_FILE = st.builds(
    FileEntry, _PATH, st.just("f"), st.sampled_from([0o644, 0o755]), st.integers(0, 1 << 40),
    st.text("0123456789abcdef", min_size=64, max_size=64),
    st.sampled_from(["stock", "patched", "unowned"]), st.integers(-1, 0),
)  # fmt: skip


@given(st.lists(_FILE, max_size=6, unique_by=lambda e: e.path), _TEXT, st.lists(st.tuples(_TEXT, _TEXT), max_size=2))
def test_every_honest_manifest_survives_the_round_trip(files, text, scripts) -> None:  # type: ignore[no-untyped-def]
    dist = Distribution("d", "1", "d-1.dist-info", packages=(text,), scripts=tuple(scripts), requires=(text,))
    one = Manifest("h", text, PYTHON, (dist,), tuple(sorted(files)), facts={text: [text]})
    assert decode(encode(one)) == one
