"""What moves, laid over a target: files that two distributions list, and paths that are a file here and a directory there."""

from __future__ import annotations

from ddtree_deploy.models import Inventory, Manifest, Plan
from ddtree_deploy.origins import Classified
from ddtree_deploy.plan import make
from ddtree_deploy.snapshot import select
from tests.fixtures.trees import entry, inventory, manifest

FIRST1 = ("first", "1.0", {"data/both.txt": "ns", "data/first.py": "1"})
FIRST2 = ("first", "2.0", {"first2.py": "2"})
SECOND = ("second", "1.0", {"data/both.txt": "ns", "data/second.py": "2"})


def files(plan: Plan) -> dict[str, str]:
    """Return what the result holds: the owner of each path (empty: nobody)."""
    names = [*(dist.name for dist in plan.result.distributions), ""]
    return {e.path: names[e.owner] for e in plan.result.files if ".dist-info/" not in e.path}


def shares(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {dist.name: dist.shares for dist in plan.result.distributions if dist.shares}


def again(plan: Plan) -> Inventory:
    """Return the target as it is after the push, known from the plan alone."""
    return inventory(distributions=plan.result.distributions, files=plan.result.files)


def places(plan: Plan) -> list[tuple[str, str]]:
    return [(check.level, check.text) for check in plan.checks if check.id == "K8-place"]


def test_a_file_stays_for_the_other_distribution_that_lists_it() -> None:
    plan = make("s", manifest(FIRST2), inventory(FIRST1, SECOND))
    assert files(plan) == {"first2.py": "first", "data/both.txt": "second", "data/second.py": "second"}
    assert shares(plan) == {} and places(plan) == []


def test_a_file_comes_with_either_distribution_that_lists_it() -> None:
    source = manifest(FIRST1, SECOND)
    assert files(make("s", source, inventory(), only=["second"])) == {"data/both.txt": "second", "data/second.py": "second"}
    found = select(Classified(source.distributions, source.files, ()), ["second"])
    assert [e.path for e in found.files if e.path.startswith("data/")] == ["data/both.txt", "data/second.py"]
    assert {e.owner for e in found.files} == {0} and found.distributions[0].shares == ()


def test_what_a_push_made_shared_is_known_at_the_next() -> None:
    """The file is first the target's own, then also that of what came; it goes when neither is there any more."""
    plan = make("s", manifest(SECOND), inventory(FIRST1))
    assert files(plan) == {"data/both.txt": "second", "data/first.py": "first", "data/second.py": "second"}
    assert shares(plan) == {"first": ("data/both.txt",)}
    gone = make("s", manifest(("second", "2.0", {"second2.py": ""})), again(plan))
    assert files(gone) == {"data/both.txt": "first", "data/first.py": "first", "second2.py": "second"}
    both = make("s", manifest(FIRST2, ("second", "2.0", {"second2.py": ""})), again(plan))
    assert files(both) == {"first2.py": "first", "second2.py": "second"}


def test_a_file_of_another_content_over_that_of_what_stays_is_told() -> None:
    plan = make("s", manifest(("new", "1.0", {"share/data": "new"})), inventory(("own", "1.0", {"share/data": "old"})))
    ((level, text),) = places(plan)
    assert level == "warn" and "1 of the files of distributions that stay are overwritten with another content" in text
    assert next(check.evidence for check in plan.checks if check.id == "K8-place") == ("`share/data` of own 1.0, by new 1.0",)
    assert shares(plan) == {"own": ("share/data",)}


def test_a_directory_of_what_stays_under_a_file_that_comes_is_refused() -> None:
    own = ("own", "1.0", {"own.py": "", "data/a": "", "data/deep/b": ""})
    plan = make("s", manifest(("new", "1.0", {"new.py": "", "data": "a file"})), inventory(own))
    text = "own 1.0, which stays, would lose 2 of its files: `data/a` and `data` can not both be there: new 1.0 brings the second"
    assert places(plan) == [("block", text)] and "data/a" not in files(plan)
    # When it goes, nothing is lost.
    assert places(make("s", manifest(("own", "2.0", {"data": "a file"})), inventory(own))) == []


def test_a_file_of_what_stays_under_a_directory_that_comes_is_refused() -> None:
    plan = make("s", manifest(("new", "1.0", {"new.py": "", "data/a": ""})), inventory(("own", "1.0", {"own.py": "", "data": "a file"})))
    text = "own 1.0, which stays, would lose 1 of its files: `data` and `data/a` can not both be there: new 1.0 brings the second"
    assert places(plan) == [("block", text)] and "data" not in files(plan)


def test_what_nobody_owns_gives_way_and_is_told() -> None:
    loose = {"data/mine": "x"}
    plan = make("s", manifest(("new", "1.0", {"data": "a file"})), inventory(("own", "1.0", {"own.py": ""}), loose=loose))
    ((level, text),) = places(plan)
    assert level == "warn" and text.startswith("1 of the files that nobody owns would go: `data/mine` and `data` can not both be there")


def test_a_manifest_that_shadows_itself_is_left_to_the_agent_to_refuse() -> None:
    hostile = Manifest("a", "/a", manifest().python, (), (entry("x", "1", owner=-1), entry("x/y", "2", owner=-1)))
    assert [e.path for e in make("s", hostile, inventory()).result.files] == ["x", "x/y"]
