"""The planner: which tree results, and what is said about it. Pure, so every rule is a few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.models import Manifest, Plan
from ddtree_deploy.plan import chosen, file_changes, interpreter_checks, make, probe_modules
from tests.fixtures.trees import PYTHON, entry, inventory, manifest

ALPHA1 = ("alpha", "1.0", {"alpha/__init__.py": "1", "alpha/old.py": "stale"})
ALPHA2 = ("alpha", "2.0", {"alpha/__init__.py": "2", "alpha/new.py": "fresh"})
KEEP = ("keep", "1.0", {"keep/__init__.py": "k"})


def held(plan: Plan) -> dict[str, str]:
    return {e.path: e.digest for e in plan.result.files}


def paths(plan: Plan) -> list[str]:
    return [e.path for e in plan.result.files if ".dist-info/" not in e.path]


def rows(plan: Plan) -> dict[str, tuple[str, str, str]]:
    return {row.name: (row.action, row.before, row.after) for row in plan.packages}


def test_a_namesake_is_replaced_whole_and_the_rest_is_kept() -> None:
    plan = make("s", manifest(ALPHA2), inventory(ALPHA1, KEEP))
    assert paths(plan) == ["alpha/__init__.py", "alpha/new.py", "keep/__init__.py"]
    assert not [path for path in held(plan) if path.startswith("alpha-1.0")]
    assert rows(plan) == {"alpha": ("replace", "1.0", "2.0"), "keep": ("keep", "1.0", "1.0")}
    assert {d.name for d in plan.result.distributions} == {"alpha", "keep"}


def test_owners_of_the_result_name_the_right_distributions() -> None:
    plan = make("s", manifest(("zeta", "1", {"zeta/__init__.py": ""}), ALPHA2), inventory(ALPHA1, KEEP))
    names = {e.path: plan.result.distributions[e.owner].name for e in plan.result.files}
    assert all(path.startswith(name) for path, name in names.items())


@pytest.mark.parametrize("spelling", ["Foo_Bar", "foo.bar", "FOO-bar"])
def test_names_are_compared_as_pep_503_does(spelling: str) -> None:
    plan = make("s", manifest(("foo-bar", "2", {"foo_bar/__init__.py": "2"})), inventory((spelling, "1", {"foo_bar/gone.py": "1"})))
    assert paths(plan) == ["foo_bar/__init__.py"]
    assert [d.name for d in plan.result.distributions] == ["foo-bar"]


def test_another_distribution_that_owns_the_same_import_package_goes_and_the_reason_is_told() -> None:
    plan = make("s", manifest(ALPHA2), inventory(("alpha-fork", "9", {"alpha/__init__.py": "fork", "extra/__init__.py": "e"}), KEEP))
    assert paths(plan) == ["alpha/__init__.py", "alpha/new.py", "keep/__init__.py"]
    (row,) = [row for row in plan.packages if row.name == "alpha-fork"]
    assert (row.action, row.before, row.after) == ("remove", "9", "")
    assert "`alpha`" in row.why


def test_another_distribution_that_owns_the_same_shared_object_goes() -> None:
    theirs = ("blas-a", "1", {"blas.libs/libopenblas.so": "a", "blas_a/__init__.py": ""})
    ours = ("blas-b", "1", {"blas.libs/libopenblas.so": "b", "blas_b/__init__.py": ""})
    plan = make("s", manifest(ours), inventory(theirs))
    assert paths(plan) == ["blas.libs/libopenblas.so", "blas_b/__init__.py"]


def test_a_namespace_is_shared_by_distributions_of_both_sides() -> None:
    plan = make("s", manifest(("google-a", "2", {"google/a.py": "2"})), inventory(("google-b", "1", {"google/b.py": "1"})))
    assert paths(plan) == ["google/a.py", "google/b.py"]


def test_a_path_that_two_distributions_own_comes_from_the_snapshot() -> None:
    theirs = inventory(("b", "1", {"share/licence.txt": "theirs", "b/__init__.py": ""}))
    plan = make("s", manifest(("a", "1", {"share/licence.txt": "ours"})), theirs)
    assert held(plan)["share/licence.txt"] == entry("x", "ours").digest
    assert "b/__init__.py" in held(plan)


def test_unowned_files_of_the_target_stay_outside_replaced_packages_only() -> None:
    plan = make("s", manifest(ALPHA2), inventory(ALPHA1, loose={"alpha/hand.py": "patch", "mine.py": "m", "local/x.py": "x"}))
    assert paths(plan) == ["alpha/__init__.py", "alpha/new.py", "local/x.py", "mine.py"]


def test_unowned_files_of_the_snapshot_come_along() -> None:
    source = manifest(ALPHA2, KEEP, loose={"alpha/hand.py": "patch", "mine.py": "m", "keep/hand.py": "k"})
    assert {"alpha/hand.py", "mine.py", "keep/hand.py"} <= set(paths(make("s", source, inventory(ALPHA1))))
    narrowed = make("s", source, inventory(ALPHA1), only=["alpha"])
    assert paths(narrowed) == ["alpha/__init__.py", "alpha/hand.py", "alpha/new.py"]
    assert narrowed.selected == ("alpha",)


def test_a_link_or_file_of_the_target_does_not_hide_a_package_of_the_snapshot() -> None:
    """The snapshot wins where the target has a file or a link in the place of a directory that it brings."""
    for blocker in ("->keep", "a module without a suffix"):
        plan = make("s", manifest(ALPHA2), inventory(KEEP, loose={"alpha": blocker}))
        assert paths(plan) == ["alpha/__init__.py", "alpha/new.py", "keep/__init__.py"]


def test_a_file_of_the_snapshot_takes_the_place_of_a_directory_of_the_target() -> None:
    plan = make("s", manifest(("a", "1", {"data": "->a", "a/__init__.py": ""})), inventory(loose={"data/x.txt": "x"}))
    assert paths(plan) == ["a/__init__.py", "data"]


def test_nothing_changes_when_the_target_holds_the_snapshot() -> None:
    plan = make("s", manifest(ALPHA2), inventory(ALPHA2, KEEP))
    assert plan.empty and not plan.blocks
    assert {row.action for row in plan.packages} == {"keep"}


def test_the_same_version_with_other_files_is_a_change_and_patches_are_counted() -> None:
    source = manifest(ALPHA2)
    digest = entry("", "p").digest
    files = tuple(e._replace(digest=digest, origin="patched") if e.path == "alpha/new.py" else e for e in source.files)
    patched = replace(source, files=files)
    plan = make("s", patched, inventory(ALPHA2))
    (row,) = plan.packages
    assert (row.action, row.files, row.why) == ("change", 1, "1 patched")
    assert [(c.sign, c.path) for c in plan.changes] == [("~", "alpha/new.py")]


def test_file_changes_see_content_kind_mode_and_link_target() -> None:
    before = [entry("a", "1"), entry("b", "->x"), entry("c", "1"), entry("d", "1"), entry("gone", "1"), entry("same", "1")]
    after = [entry("a", "2"), entry("b", "->y"), entry("c", "1", mode=0o755), entry("d", "->1"), entry("new", "1"), entry("same", "1")]
    changes = [(c.sign, c.path) for c in file_changes(before, after)]
    assert changes == [("~", "a"), ("~", "b"), ("~", "c"), ("~", "d"), ("-", "gone"), ("+", "new")]


def test_names_choose_by_distribution_import_package_and_star() -> None:
    cublas, yaml = ("nvidia-cublas", "1", {"nvidia/cublas.py": ""}), ("PyYAML", "6", {"yaml/__init__.py": ""})
    dists = manifest(cublas, ("nvidia-nccl", "1", {}), yaml).distributions
    assert chosen(dists, ["yaml"]) == {"PyYAML"}
    assert chosen(dists, ["pyyaml"]) == {"PyYAML"}
    assert chosen(dists, ["nvidia-*"]) == {"nvidia-cublas", "nvidia-nccl"}
    with pytest.raises(UsageProblem) as caught:
        chosen(dists, ["nvidia-cubla"])
    assert "nvidia-cublas" in caught.value.mend


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("version", "3.11.9", "python 3.12 against 3.11"), ("implementation", "pypy", "pypy"), ("machine", "aarch64", "aarch64"),
        ("free_threaded", True, "extension suffix"), ("debug", True, "extension suffix"), ("abiflags", "t", "extension suffix"),
    ],
)  # fmt: skip
def test_another_interpreter_blocks(field: str, value: object, word: str) -> None:
    (check,) = interpreter_checks(PYTHON, replace(PYTHON, **{field: value}))
    assert check.level == "block" and word in check.text and check.mend


def test_a_patch_release_does_not_block() -> None:
    (check,) = interpreter_checks(PYTHON, replace(PYTHON, version="3.12.9"))
    assert check.level == "ok"


def test_space_and_place_are_checked_before_anything_is_sent() -> None:
    full = make("s", manifest(ALPHA2), inventory(ALPHA1, free_bytes=3))
    assert any("are needed there, 3 are free" in check.text for check in full.blocks)
    inodes = make("s", manifest(ALPHA2), inventory(ALPHA1, free_inodes=10))
    assert any("inodes" in check.text for check in inodes.blocks)
    for facts in ({"writable": False}, {"space": {"read_only": True}}, {"space": {"noexec": True}}):
        assert make("s", manifest(ALPHA2), inventory(ALPHA1, facts=facts)).blocks
    # What is there already costs nothing.
    assert not make("s", manifest(ALPHA2), inventory(ALPHA2, free_bytes=0)).blocks


def test_what_a_generation_can_not_hold_is_told_before_it_is_left_behind() -> None:
    plan = make("s", manifest(ALPHA2), inventory(KEEP, facts={"left_behind": ["tensorrt (outside-link)"]}))
    (check,) = [check for check in plan.checks if "can not be carried" in check.text]
    assert (check.level, check.evidence) == ("warn", ("tensorrt (outside-link)",))


def test_what_changes_is_probed_and_the_roots_that_are_there() -> None:
    plan = make("s", manifest(ALPHA2), inventory(ALPHA1, KEEP, ("torch", "1", {"torch/__init__.py": "t"})))
    assert probe_modules(plan, ("torch", "sglang")) == ["alpha", "torch"]


_NAME = st.sampled_from(["a", "b", "c", "d"])
_PATHS = [f"{p}/{f}.py" for p in "abcd" for f in ("__init__", "x", "y")] + ["top.py"]
_FILES = st.dictionaries(st.sampled_from(_PATHS), st.sampled_from("123"), max_size=6)
_DISTS = st.lists(st.tuples(_NAME, st.sampled_from(["1", "2"]), _FILES), max_size=4, unique_by=lambda d: d[0])


@given(_DISTS, _FILES, _DISTS, _FILES)
def test_whatever_is_composed_the_snapshot_arrives_whole_and_a_second_push_is_empty(source, loose, target, mine) -> None:  # type: ignore[no-untyped-def]
    snapshot: Manifest = manifest(*source, loose=loose)
    there = inventory(*target, loose=mine)
    plan = make("s", snapshot, there)
    result = {e.path: e for e in plan.result.files}
    assert len(result) == len(plan.result.files)
    for e in snapshot.files:
        assert result[e.path].digest == {f.path: f for f in snapshot.files}[e.path].digest
    assert all(-1 <= e.owner < len(plan.result.distributions) for e in plan.result.files)
    again = make("s", snapshot, replace(there, distributions=plan.result.distributions, files=plan.result.files))
    assert again.empty
