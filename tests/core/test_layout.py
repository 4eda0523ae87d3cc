"""Where things lie in a venv: numbers, links, records, the index, and what a torn file is taken for."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.layout import Index, Layout, locate
from ddtree_deploy.agent.stage import apply_delta
from ddtree_deploy.agent.walk import seal, walk
from tests.fixtures.venvs import SITE, make_venv, package


@pytest.fixture
def found(tmp_path: Path) -> Layout:
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    for number in (0, 1, 3):
        (venv / ".ddtree" / "generations" / str(number) / "site-packages").mkdir(parents=True)
    layout = locate(str(venv))
    for number in (0, 1, 3):
        layout.write_info(number, {"number": number})
    return layout


def go_live(found: Layout, number: int) -> None:
    site = Path(found.site)
    if site.is_symlink():
        site.unlink()
    else:
        site.rename(site.with_name("was"))
    site.symlink_to(found.link_text(number))


def test_the_link_is_relative_so_that_the_venv_may_be_mounted_elsewhere(found: Layout) -> None:
    go_live(found, 3)
    assert found.live() == 3
    assert os.path.realpath(found.site) == os.path.realpath(found.tree(3))
    assert not found.link_text(3).startswith("/")


@pytest.mark.parametrize("target", ["../../.ddtree/generations/x/site-packages", "/elsewhere", "../../.ddtree/generations/1"])
def test_a_link_of_somebody_else_is_an_ordinary_venv(found: Layout, target: str) -> None:
    go_live(found, 3)
    Path(found.site).unlink()
    Path(found.site).symlink_to(target)
    assert found.live() is None


def test_only_directories_with_a_record_are_generations(found: Layout) -> None:
    os.unlink(os.path.join(found.directory(1), "generation.json"))
    os.mkdir(os.path.join(found.generations, "7.partial"))
    assert found.numbers() == [0, 3]
    assert [os.path.basename(path) for path in found.partials()] == ["1", "7.partial"]


def test_a_torn_record_is_no_record(found: Layout) -> None:
    Path(found.directory(3), "generation.json").write_text('{"number": 3')
    assert found.numbers() == [0, 1]


def test_a_number_is_never_used_twice_not_even_after_pruning(found: Layout) -> None:
    assert found.next_number() == 4
    Path(found.ledger).write_text(json.dumps({"event": "reverted", "generation": 9}) + "\n")
    assert found.next_number() == 10


def test_a_torn_last_line_of_the_ledger_is_left_out(found: Layout) -> None:
    Path(found.ledger).write_text('{"event": "confirmed", "generation": 1, "previous": 0}\n{"event": "rev')
    assert [entry["event"] for entry in found.ledger_entries()] == ["confirmed"]


def test_the_generation_before_is_what_the_ledger_says_else_the_nearest_older(found: Layout) -> None:
    assert found.previous_of(3) == 1
    Path(found.ledger).write_text(json.dumps({"event": "confirmed", "generation": 3, "previous": 0}) + "\n")
    assert found.previous_of(3) == 0
    Path(found.ledger).write_text(json.dumps({"event": "confirmed", "generation": 3, "previous": 2}) + "\n")
    assert found.previous_of(3) == 1
    assert found.previous_of(0) is None


def test_an_index_survives_and_rubbish_is_none(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    rows = {"a": ("f", 0o644, 3, "d" * 64, 1, 2, 3, 4), "b": ("l", 0o777, 0, 'a "b"\\', 1, 2, 3, 4)}
    rows['c"\\\n\udcff\u00e9'] = ("?", 0, 0, "", 0, 0, 0, 0)
    Index(rows).save(path)
    loaded = Index.load(path)
    assert loaded is not None and loaded.rows == rows
    for rubbish in ("", "[]", "null", '{"version": 99, "files": []}', '{"version": 1, "files": [[]]}', '{"version": 1}'):
        Path(path).write_text(rubbish)
        assert Index.load(path) is None
    assert Index.load(str(tmp_path / "gone")) is None


def test_an_index_takes_its_stamps_from_a_walk_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/a").write_text("one")
    (tmp_path / "tree/b").symlink_to("a")
    seen = walk(str(tmp_path / "tree"))
    rows = {"a": ("f", 0o644, 3, "d" * 64, 1, 2, 3, None), "b": ("l", 0o777, 0, "a", 1, 2, 3, None)}
    path = str(tmp_path / "index")
    Index(rows).save(path, seen)
    loaded = Index.load(path)
    assert loaded is not None and [loaded.digest(entry) for entry in seen] == ["d" * 64, None]
    assert {name: row[3] for name, row in loaded.rows.items()} == {"a": "d" * 64, "b": "a"}
    assert Index.seal_of(path) == seal(seen)


def test_the_text_of_an_index_names_its_digests(tmp_path: Path) -> None:
    path = str(tmp_path / "index")
    Index({"a": ("f", 0o644, 3, "d" * 64, 1, 2, 3, 4), "b/c": ("f", 0o644, 3, "e" * 64, 1, 2, 3, 4)}).save(path)
    assert [letter * 64 in Index.text(path).decode() for letter in "def"] == [True, True, False]
    assert Index.text(str(tmp_path / "gone")) == b""


def test_a_delta_is_refused_when_a_new_path_lies_below_a_file(tmp_path: Path) -> None:
    index = Index({"a": ("f", 0o644, 3, "d" * 64, 1, 2, 3, 4), "b/c": ("f", 0o644, 3, "e" * 64, 1, 2, 3, 4)})
    assert [row[0] for row in apply_delta(index, [["a", "f", 0o644, 1, "f" * 64]], ["b/c"])] == ["a"]
    for path in ("a/new", "b"):
        with pytest.raises(Failure, match="malformed or hostile"):
            apply_delta(index, [[path, "f", 0o644, 1, "f" * 64]], [])


def test_what_is_not_a_venv_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no venv"):
        locate(str(tmp_path / "gone"))
    (tmp_path / "plain").mkdir()
    with pytest.raises(Failure, match=r"pyvenv\.cfg"):
        locate(str(tmp_path / "plain"))
    venv = make_venv(tmp_path / "two")
    (venv / "lib" / "python3.9" / "site-packages").mkdir(parents=True)
    with pytest.raises(Failure, match="more than one"):
        locate(str(venv))


def test_an_adoption_that_was_cut_in_its_gap_can_still_be_located(tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "1.0"))
    (venv / ".ddtree" / "generations" / "0").mkdir(parents=True)
    (venv / SITE).rename(venv / ".ddtree" / "generations" / "0" / "site-packages")
    assert locate(str(venv)).site_relative == SITE
