"""P18: what can not load there is refused before a byte is sent, by the name of the symbol and of who provides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_deploy.abi import Allowance
from ddtree_deploy.errors import Incompatible
from ddtree_deploy.events import Event, Progress, Step
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.transfer import push
from tests.abi.lab import GCC, Env
from tests.faults.harness import outcome
from tests.fixtures.venvs import make_venv, site, tree_hash
from tests.fixtures.world import QUICK, local, replace, yes

pytestmark = pytest.mark.skipif(GCC is None, reason="no gcc: the shared objects of these tests are compiled here")
COMMON, FRESH = "_ZN3c105ErrorEv", "_ZN3c1013MessageLogger6streamEv"


def environment(root: Path, torch: str, kernel: str, uses: str) -> Path:
    """Make a venv with a small torch that provides `uses`, and a kernel of real machine code that needs it."""
    venv = make_venv(root)
    env = Env(site(venv))
    env.cuda(13)
    env.torch(torch, exports=sorted({COMMON, uses}))
    env.so("sgl_kernel/ops.abi3.so", uses=[uses], links=[env.root / "torch/lib/libc10.so"])
    (env.root / "sgl_kernel/__init__.py").write_text(f"__version__ = '{kernel}'\n")
    env.dist("sglang-kernel", kernel, ["sgl_kernel"])
    return venv


def test_a_missing_symbol_is_refused_with_its_name_and_its_provider(tmp_path: Path) -> None:
    source = environment(tmp_path / "source", "2.11.0+cu130", "0.4.2", FRESH)
    target = environment(tmp_path / "target", "2.10.0+cu130", "0.4.1", COMMON)
    store = Store.open(tmp_path / "home")
    snapshot = take(local(source), store, probe=False).ref.id
    before = tree_hash(target)
    seen: list[Event] = []
    options = replace(QUICK, only=("sglang-kernel",))
    _done, error = outcome(lambda: push(local(target), store, snapshot, options, approve=yes, emit=seen.append))
    assert isinstance(error, Incompatible) and error.exit_code == 13, repr(error)
    said = "\n".join([error.message, *error.causes])
    assert "`c10::MessageLogger::stream`" in said and "torch 2.11.0+cu130" in said, said
    assert "--only sglang-kernel --only torch" in error.mend.replace("--with", "--only"), error.mend
    assert tree_hash(target) == before
    assert not [event for event in seen if isinstance(event, Step) and event.what.startswith("send")]
    assert not [event for event in seen if isinstance(event, Progress) and event.what == "send"]


def test_a_refusal_says_how_it_can_be_taken_on(tmp_path: Path) -> None:
    source = environment(tmp_path / "source", "2.11.0+cu130", "0.4.2", FRESH)
    (site(source) / "sgl_kernel/__init__.py").unlink()
    store = Store.open(tmp_path / "home")
    snapshot = take(local(source), store, probe=False, allow_drift=True).ref.id
    target = make_venv(tmp_path / "target")
    _done, error = outcome(lambda: push(local(target), store, snapshot, QUICK, approve=yes))
    assert isinstance(error, Incompatible), repr(error)
    assert "`--allow K8:sglang-kernel --reason WHY`" in error.mend, error.mend
    taken_on = replace(QUICK, allow=(Allowance.parse("K8:sglang-kernel", "slimmed on purpose"),))
    done, error = outcome(lambda: push(local(target), store, snapshot, taken_on, approve=yes))
    assert error is None and done is not None, repr(error)
