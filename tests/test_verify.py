"""`verify` on a real venv through a real agent: each level on its own, and what each kind of damage looks like."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ddtree_deploy.errors import ProofFailed, UsageProblem
from ddtree_deploy.events import Event, Note
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import Plan
from ddtree_deploy.push.request import PushOptions
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.transfer import push
from ddtree_deploy.verify import verify
from tests.fixtures.venvs import Dist, contents, install, make_venv, site


def local(venv: Path) -> Host:
    return Host(name="local", transport="local", venv=os.fspath(venv))


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    """A venv that got a push: with a template that never compiled, and a package that never imported."""
    base = tmp_path_factory.mktemp("pushed")
    source, target, store = make_venv(base / "source"), make_venv(base / "target"), Store.open(base / "store")
    install(source, Dist("alpha", "2.0", {"alpha/__init__.py": "import beta\n", "alpha/template.py": "{{ name }} = $\n"}))
    install(source, Dist("beta", "1.0", {"beta/__init__.py": "value = 1\n"}))
    install(source, Dist("needs-gpu", "1.0", {"needs_gpu.py": "import no_such_driver\n"}))
    install(target, Dist("kept", "1.0", {"kept.py": "print('noise on stdout')\n"}))

    def approve(plan: Plan) -> bool:
        return not plan.blocks

    push(local(target), store, take(local(source), store).ref.id, PushOptions(), approve=approve)
    return target, store


@pytest.fixture
def store(pushed: tuple[Path, Store]) -> Store:
    return pushed[1]


@pytest.fixture
def target(pushed: tuple[Path, Store], tmp_path: Path) -> Path:
    """A copy for the test to damage (its files have other inodes, so nothing is vouched for)."""
    return Path(shutil.copytree(pushed[0], tmp_path / "target", symlinks=True))


def test_a_tree_as_it_was_pushed_is_proved_on_every_level(target: Path, store: Store) -> None:
    before = contents(site(target).resolve())
    proofs = verify(local(target), store)
    assert proofs.ok
    assert proofs.where == "live"
    assert proofs.hashed is not None
    assert proofs.hashed + proofs.vouched == sum(
        path.is_file() for path in site(target).rglob("*") if path.suffix != ".pyc"
    )
    assert proofs.compiled == 4
    assert proofs.imports is not None
    assert {proof.module: proof.ok for proof in proofs.imports} == {
        "alpha": True,
        "beta": True,
        "kept": True,
        "needs_gpu": False,
    }
    # It did not import on the source host either; the push recorded that on the target, so no store is needed to know it.
    assert {proof.module for proof in proofs.imports if proof.baseline} == {"needs_gpu"}
    assert verify(local(target), None, levels=["import"]).ok
    assert contents(site(target).resolve()) == before


def test_only_the_levels_that_are_asked_for_run(target: Path, store: Store) -> None:
    files = verify(local(target), store, levels=["files"])
    assert files.hashed is not None
    assert (files.compiled, files.imports) == (None, None)
    syntax = verify(local(target), store, levels=["syntax"])
    assert syntax.compiled == 4
    assert (syntax.hashed, syntax.imports) == (None, None)


def test_a_file_edited_by_hand_is_named_on_each_level(target: Path, store: Store) -> None:
    (site(target) / "beta" / "__init__.py").write_text("value = (1,\n")  # of another length: else a .pyc of the same second passes for it
    proofs = verify(local(target), store)
    assert not proofs.ok
    assert [line.partition(":")[0] for line in proofs.bad_files] == ["beta/__init__.py"]
    assert [path for path, _text in proofs.syntax_errors] == ["beta/__init__.py"]
    assert proofs.imports is not None
    assert {proof.module for proof in proofs.imports if not proof.ok and not proof.baseline} == {"alpha", "beta"}
    assert "beta/__init__.py" in proofs.imports[0].traceback


def test_files_that_came_and_went_are_named(target: Path, store: Store) -> None:
    packages = site(target)
    (packages / "kept.py").unlink()
    (packages / "added.py").write_text("")
    assert verify(local(target), store, levels=["files"]).bad_files == (
        "added.py: not part of the set",
        "kept.py: missing",
    )


def test_deep_reads_what_a_stamp_would_vouch_for(pushed: tuple[Path, Store]) -> None:
    target, store = pushed
    usual = verify(local(target), store, levels=["files"])
    deep = verify(local(target), store, levels=["files"], deep=True)
    assert usual.hashed is not None
    assert (deep.hashed, deep.vouched) == (usual.hashed + usual.vouched, 0)
    assert deep.bad_files == ()


def test_bytecode_that_belongs_to_another_source_is_found_even_below_a_stock_file(target: Path, store: Store) -> None:
    """A source whose bytecode was made from other text of the same size and time."""
    source = site(target) / "beta" / "__init__.py"
    info, text = source.stat(), source.read_text()
    for content in ("value = 7\n", text):
        source.write_text(content)
        os.utime(source, ns=(info.st_atime_ns, info.st_mtime_ns))
        if content != text:
            import py_compile

            py_compile.compile(os.fspath(source), doraise=True)
    proofs = verify(local(target), store)
    assert proofs.bad_files == ()
    assert [(path, text.partition(":")[0]) for path, text in proofs.syntax_errors] == [
        ("beta/__init__.py", "stale bytecode")
    ]


def test_an_ordinary_venv_is_compiled_and_imported(tmp_path: Path, store: Store) -> None:
    venv = make_venv(tmp_path / "venv")
    install(venv, Dist("alpha", "1.0", {"alpha.py": "x = 1\n"}))
    events: list[Event] = []
    proofs = verify(local(venv), store, emit=events.append)
    assert proofs.ok
    assert proofs.hashed is None
    assert proofs.compiled == 1
    assert any(
        isinstance(event, Note) and event.level == "warn" and "nothing was pushed" in event.text for event in events
    )
    with pytest.raises(UsageProblem, match="no generation of ours"):
        verify(local(venv), store, levels=["files"])


def test_an_unknown_level_and_a_missing_venv_are_usage_problems(tmp_path: Path, store: Store) -> None:
    with pytest.raises(UsageProblem, match="unknown level: `gpus`"):
        verify(local(tmp_path), store, levels=["gpus"])
    with pytest.raises(UsageProblem, match="there is no venv"):
        verify(local(tmp_path / "none"), store)


def test_what_is_new_on_the_target_must_import_there_although_nobody_tried_it_on_the_source(tmp_path: Path) -> None:
    source, target, store = make_venv(tmp_path / "source"), make_venv(tmp_path / "target"), Store.open(tmp_path / "store")
    install(source, Dist("needs-gpu", "1.0", {"needs_gpu.py": "import no_such_driver\n"}))
    install(target, Dist("needs-gpu", "0.9", {"needs_gpu.py": "import no_such_driver  # as ever\n"}))
    untried = take(local(source), store, probe=False).ref.id
    push(local(target), store, untried, PushOptions(), approve=lambda _plan: True)  # it was broken there before, too
    before = contents(site(target).resolve())
    install(source, Dist("new", "1.0", {"new/__init__.py": "import no_such_module\n"}))
    with pytest.raises(ProofFailed, match="not proved") as refused:
        push(local(target), store, take(local(source), store, probe=False).ref.id, PushOptions(), approve=lambda _plan: True)
    assert any("import new" in line for line in refused.value.causes) and not any("needs_gpu" in line for line in refused.value.causes)
    assert contents(site(target).resolve()) == before
