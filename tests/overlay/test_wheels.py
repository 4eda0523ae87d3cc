"""Against the real wheels: build, check, apply, revert, refuse; contracts of all supported versions."""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_overlay import build, install, manifest
from sglang_overlay.anchors import find_scope
from sglang_overlay.contract import check_contract, contract
from sglang_overlay.edits.v0_5_11 import EDITS, NEW_FILE
from sglang_overlay.errors import BaseMismatch, OverlayError, UnknownVersion

pytestmark = pytest.mark.slow
VERSIONS = tuple(manifest.load())
BASE = tuple(manifest.pinned("0.5.11").base)
Stock = Callable[[str], Path]


def contents(site: Path) -> dict[str, bytes]:
    return {str(p.relative_to(site)): p.read_bytes() for p in sorted(site.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifest_pins_what_the_wheel_holds(stock: Stock, version: str) -> None:
    pins = manifest.pinned(version)
    for path, want in {**pins.base, **pins.reads}.items():
        assert manifest.sha256((stock(version) / path).read_bytes()) == want, path


@pytest.mark.parametrize("version", VERSIONS)
def test_the_contract_holds(stock: Stock, version: str) -> None:
    assert len(contract(version)) > 10
    assert check_contract(stock(version), version) == ()


def test_a_renamed_parameter_or_symbol_breaks_the_contract(stock: Stock, tmp_path: Path) -> None:
    for path in {symbol.path for symbol in contract("0.5.11")}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stock("0.5.11") / path, tmp_path / path)
    scheduler = tmp_path / "sglang/srt/managers/scheduler.py"
    scheduler.write_text(scheduler.read_text().replace("def validate_dflash_request(", "def check_dflash_request("))
    slots = tmp_path / "sglang/srt/speculative/spec_utils.py"
    slots.write_text(slots.read_text().replace("end_offset", "last_offset"))
    broken = [str(one) for one in check_contract(tmp_path, "0.5.11")]
    assert len(broken) == 2
    assert any("validate_dflash_request" in one and "missing" in one for one in broken)
    assert any("end_offset" in one for one in broken)


def test_results_are_the_pinned_ones_and_do_not_depend_on_when(stock: Stock) -> None:
    first, second = (build.build(stock("0.5.11"), "0.5.11") for _ in range(2))
    assert first == second
    assert {f.path: f.sha256 for f in first} == dict(manifest.pinned("0.5.11").built)


def test_cutting_our_insertions_out_gives_the_stock_bytes(stock: Stock) -> None:
    """So DFLASH, and everything else, is what it was: an insertion that is never reached changes nothing."""
    for built in build.build(stock("0.5.11"), "0.5.11"):
        if built.path != NEW_FILE:
            assert built.spans
            assert build.cut(built.data, built.spans) == (stock("0.5.11") / built.path).read_bytes()


def test_every_edit_is_in_the_result_as_often_as_its_anchor_says(stock: Stock) -> None:
    files = {f.path: f for f in build.build(stock("0.5.11"), "0.5.11")}
    for path in BASE:
        inserted = sorted(files[path].data[at : at + size].decode() for at, size in files[path].spans)
        assert inserted == sorted(e.text for e in EDITS if e.path == path for _ in range(e.anchor.count))


def test_what_an_insertion_names_is_bound_where_it_stands(stock: Stock) -> None:
    """A parse does not notice a name that the stock method does not have."""
    files = {f.path: f.data for f in build.build(stock("0.5.11"), "0.5.11")}
    tree = ast.parse(files["sglang/srt/speculative/dflash_worker.py"])
    for method, called in (
        ("DFlashWorker._prepare_for_speculative_decoding", "prepare_verify"),
        ("DFlashWorker.__init__", "start_ddtree"),
    ):
        scope = find_scope(tree, method)
        assert isinstance(scope, ast.FunctionDef)
        (call,) = (n for n in ast.walk(scope) if isinstance(n, ast.Call) and ast.unparse(n.func) == called)
        bound = {a.arg for a in scope.args.args} | {
            n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.lineno < call.lineno
        }
        names = {n.id for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
        assert names and names <= bound


@pytest.mark.parametrize("feature", [(3, 10), (3, 11), (3, 12)])
def test_results_parse_in_every_python_sglang_runs_on(stock: Stock, feature: tuple[int, int]) -> None:
    for built in build.build(stock("0.5.11"), "0.5.11"):
        ast.parse(built.data, feature_version=feature)


def test_apply_twice_then_revert(site: Path) -> None:
    before = contents(site)
    assert build.describe(build.check(site)) == "stock"
    change = install.apply(site)
    assert change.written[0] == NEW_FILE and len(change.written) == 5
    after = contents(site)
    assert build.describe(build.check(site)) == f"ddtree overlay {change.overlay_id[:7]}, byte-identical"
    assert install.apply(site).written == ()
    assert contents(site) == after
    back = install.revert(site)
    assert back.removed == (NEW_FILE,) and len(back.written) == 4
    assert contents(site) == before
    assert install.revert(site).written == ()


def test_apply_leaves_hard_links_elsewhere_alone(site: Path, tmp_path: Path) -> None:
    twin = tmp_path / "older-generation.py"
    twin.hardlink_to(site / BASE[0])
    before = twin.read_bytes()
    install.apply(site)
    assert twin.read_bytes() == before != (site / BASE[0]).read_bytes()


@pytest.mark.parametrize("path", BASE)
@pytest.mark.parametrize("where", ["first", "middle", "last", "missing"])
def test_a_changed_byte_anywhere_is_refused_and_nothing_is_written(site: Path, path: str, where: str) -> None:
    file = site / path
    data = bytearray(file.read_bytes())
    if where == "missing":
        file.unlink()
    else:
        data[{"first": 0, "middle": len(data) // 2, "last": -1}[where]] ^= 1
        file.write_bytes(data)
    before = contents(site)
    for attempt in (build.build, install.apply, install.revert):
        with pytest.raises(BaseMismatch, match=path.rsplit("/", 1)[1]):
            attempt(site)
    assert contents(site) == before
    assert build.check(site).foreign == (path,)
    assert path in build.describe(build.check(site))


def test_an_overlay_with_a_hand_edit_is_neither_applied_over_nor_reverted(site: Path) -> None:
    install.apply(site)
    with (site / NEW_FILE).open("a") as stream:
        stream.write("# a hand edit\n")
    before = contents(site)
    for attempt in (install.apply, install.revert):
        with pytest.raises(BaseMismatch):
            attempt(site)
    assert contents(site) == before


def test_half_an_overlay_is_named_and_can_be_reverted(site: Path) -> None:
    whole = contents(site)
    install.apply(site)
    (site / BASE[0]).write_bytes(whole[BASE[0]])
    assert "incomplete" in build.describe(build.check(site))
    install.revert(site)
    assert contents(site) == whole


@pytest.mark.parametrize("full_after", range(5))
def test_a_failing_write_puts_back_what_was_written(site: Path, monkeypatch: pytest.MonkeyPatch, full_after: int) -> None:
    before = contents(site)
    fsync, calls = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if next(calls) == full_after:
            raise OSError(errno.ENOSPC, "no space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OverlayError, match="no space left on device"):
        install.apply(site)
    assert contents(site) == before
    assert not list(site.rglob(".*.py.*"))


def test_digests_read_elsewhere_are_recognised(stock: Stock, site: Path) -> None:
    pins = manifest.pinned("0.5.11")
    assert build.recognise("0.5.11", pins.base).is_stock
    ours = build.recognise("0.5.11", pins.built)
    assert build.describe(ours) == f"ddtree overlay {pins.overlay_id[:7]}, byte-identical"
    theirs = build.recognise("0.5.11", {**pins.base, BASE[1]: "0" * 64})
    assert theirs.foreign == (BASE[1],)
    text = (site / BASE[1]).read_text().replace("import torch\n", "import torch  # patched by hand\n", 1)
    (site / BASE[1]).write_text(text)
    shown = build.diff(site, stock("0.5.11"), "0.5.11")
    assert "+import torch  # patched by hand" in shown and shown.count("\n@@") == 1


@pytest.mark.parametrize("version", ["0.5.12.post1", "0.5.23"])
def test_versions_without_edited_files_have_nothing_to_build(stock: Stock, version: str) -> None:
    with pytest.raises(UnknownVersion, match="its route is `plugin`"):
        install.apply(stock(version), version)


def test_the_seams_of_the_registry_adapter_are_in_the_order_it_counts_on(stock: Stock) -> None:
    """The adapter leaves SGLang's drafting by an exception: the greedy head is called after the slots are given back,
    and before the chain's verify input is made."""
    source = (stock("0.5.12.post1") / "sglang/srt/speculative/dflash_worker.py").read_text()
    method = find_scope(ast.parse(source), "DFlashWorker._prepare_for_speculative_decoding")
    assert method is not None
    text = ast.unparse(method)
    order = [text.index(s) for s in ("restore_state", "_greedy_sample_from_vocab_parallel_head", "prepare_for_verify(")]
    assert order == sorted(order)
    assert text.count("_greedy_sample_from_vocab_parallel_head") == 1


def test_the_command_line_says_what_it_did(site: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglang_overlay", *words, "--site", str(site)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert run("apply").stdout.endswith("byte-identical\n")
    assert run("check").returncode == 0
    assert run("revert").stdout.endswith("sglang 0.5.11: stock\n")
    (site / BASE[0]).write_text("x = 1\n")
    refused = run("apply")
    assert refused.returncode == 14
    assert "error: 1 of 4 files" in refused.stderr and "\n\nhint: " in refused.stderr


def play(script: str, site: Path, *numbers: int) -> str:
    command = [sys.executable, str(Path(__file__).with_name(script)), str(site), *map(str, numbers)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("width, rounds", [(8, 100), (16, 200), (256, 20)])
def test_slots_and_outputs_add_up_in_sglangs_own_pools(site: Path, width: int, rounds: int) -> None:
    """Budgets 7, 15 and 255."""
    install.apply(site)
    assert f"rounds: {rounds}, leaked slots: 0" in play("pool_rounds.py", site, width, rounds)


@pytest.mark.parametrize("width, rounds", [(8, 60), (256, 20)])
def test_rounds_of_the_latest_adapter_add_up_on_sglangs_own_worker(stock: Stock, width: int, rounds: int) -> None:
    """Stock 0.5.23 drafts until our exception; tree, mask, host bounds, commit and both caches are checked each round."""
    assert f"rounds: {rounds}, width: {width}" in play("v2_rounds.py", stock("0.5.23"), width, rounds)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("version", ["0.5.11", "0.5.12.post1"])
def test_nodes_attend_as_they_do_by_sglangs_own_fa3_backend(stock: Stock, version: str) -> None:
    """Eagerly, and with what a replayed graph reads; whole batches, and one that is filled up."""
    assert play("fa3_rounds.py", stock(version)) == "equal\n"
