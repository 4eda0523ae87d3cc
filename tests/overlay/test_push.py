"""`push --overlay` and the commands about it, on real stock files: composed, refused, proved, recognised, taken back."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_overlay import manifest
from sglang_overlay.edits.v0_5_11 import NEW_FILE
from tests.cli.conftest import run
from tests.fixtures.venvs import Dist, contents, make_venv, package, site
from tests.overlay.conftest import wheel_of

pytestmark = pytest.mark.slow
PINS = manifest.pinned("0.5.11")
BASE = tuple(PINS.base)
NAME = f"ddtree overlay {PINS.overlay_id[:7]}"
Stock = Callable[[str], Path]


def small(stock: Stock) -> Dist:
    """Return sglang with only the stock files that the overlay knows, and a package that imports."""
    source = stock("0.5.11")
    paths = [*PINS.base, *PINS.reads]
    return Dist("sglang", "0.5.11", {"sglang/__init__.py": "", **{path: (source / path).read_bytes() for path in paths}})


@pytest.fixture
def venv(stock: Stock, tmp_path: Path) -> Path:
    return make_venv(tmp_path / "A", small(stock), package("own", "1.0"))


def snapshot(venv: Path, label: str) -> None:
    assert run("snapshot", "-q", "local", "--venv", str(venv), "--label", label, "--no-probe").code == 0


@pytest.mark.timeout(900)  # two thousand sources are compiled three times
def test_the_real_wheel_from_stock_to_overlay_and_back(stock: Stock, tmp_path: Path) -> None:
    here, there = (make_venv(tmp_path / name) for name in "AB")
    for venv in (here, there):
        with zipfile.ZipFile(wheel_of(stock, "0.5.11")) as wheel:
            wheel.extractall(site(venv))
    before = contents(site(there))
    snapshot(here, "stock")
    pushed = run("push", "local", "--overlay", "--venv", str(there), "-y")
    assert pushed.code == 0, pushed.err
    assert "5 files changed" in pushed.out
    live = contents(site(there))
    assert {path: live[path] for path in PINS.built} == dict(PINS.built)
    assert {path: digest for path, digest in live.items() if path not in PINS.built} == {
        path: digest for path, digest in before.items() if path not in PINS.built
    }
    assert "already up to date" in run("push", "local", "--overlay", "--venv", str(there), "-y").out

    status = run("status", "local", "--venv", str(there), "--json").json
    assert (status["drift"], status["overlay"]) == (0, PINS.overlay_id)
    ledger = run("audit", "local", "--venv", str(there), "--json").json["lines"]
    assert ledger[-1]["event"] == "confirmed" and ledger[-1]["overlay"] == PINS.overlay_id
    proved = run("verify", "local", "--venv", str(there))
    assert proved.code == 0, proved.err
    assert f"overlay sglang 0.5.11 + {NAME}, byte-identical" in proved.out
    assert "imports and flags were not tried: stock sglang does not import there" in proved.out  # nothing it needs is in this venv

    snapshot(there, "over")
    assert f"sglang 0.5.11 + {NAME}, byte-identical" in run("show", "over").out
    back = run("rollback", "local", "--venv", str(there), "-y")
    assert back.code == 0, back.err
    assert contents(site(there)) == before


def test_a_base_that_somebody_changed_is_refused_by_name_and_shown(venv: Path, tmp_path: Path) -> None:
    snapshot(venv, "stock")
    text = (site(venv) / BASE[1]).read_text()
    (site(venv) / BASE[1]).write_text(text.replace("import torch\n", "import torch  # by hand\n", 1))
    snapshot(venv, "hand")
    target = make_venv(tmp_path / "B")
    for extra in (["-n"], ["-y"]):
        refused = run("push", "local", "--overlay", "--snapshot", "hand", "--venv", str(target), *extra)
        assert refused.code == 14 and f"  {BASE[1]}: " in refused.err and PINS.base[BASE[1]] in refused.err
    assert contents(site(target)) == {}
    shown = run("show", "hand")
    assert f"sglang 0.5.11, 1 file patched by somebody else: {BASE[1]}" in shown.out
    patch = run("show", "hand", "--patch").out
    assert "+import torch  # by hand" in patch and patch.count("\n@@") == 1
    checked = run("overlay", "check", "--snapshot", "hand", "--json")
    assert checked.code == 14 and BASE[1] in checked.err


def test_a_dry_run_leaves_the_store_as_it_was(venv: Path, quiet_home: Path) -> None:
    snapshot(venv, "stock")
    store = quiet_home / "ddtree/store"
    before = contents(store)
    planned = run("push", "local", "--overlay", "--venv", str(venv), "-n", "--files")
    assert planned.code == 0 and f" + {NAME} onto an ordinary venv" in planned.out
    assert [line.split()[:2] for line in planned.out.splitlines() if line[:2] in ("~ ", "+ ") and "/" in line] == [
        ["+" if path == NEW_FILE else "~", path] for path in sorted(PINS.built)
    ]
    assert contents(store) == before


def test_the_overlay_goes_over_the_targets_own_stock_files(stock: Stock, venv: Path, tmp_path: Path) -> None:
    """Nothing of sglang moves: the base is what the new generation would hold, wherever it comes from."""
    snapshot(venv, "stock")
    target = make_venv(tmp_path / "B", small(stock), package("own", "0.9"))
    pushed = run("push", "local", "--overlay", "--only", "own", "--venv", str(target), "-y")
    assert pushed.code == 0, pushed.err
    live = contents(site(target))
    assert {path: live[path] for path in PINS.built} == dict(PINS.built)
    assert "own-1.0.dist-info/METADATA" in live
    # A push without the flag brings the snapshot as it is: stock again.
    assert run("push", "local", "--only", "sglang", "--venv", str(target), "-y").code == 0
    live = contents(site(target))
    assert {path: live.get(path) for path in PINS.built} == {**PINS.base, NEW_FILE: None}


def test_build_from_a_wheel_or_a_venv_gives_the_pinned_files(stock: Stock, venv: Path, tmp_path: Path) -> None:
    wheel = str(wheel_of(stock, "0.5.11"))
    out = tmp_path / "out"
    assert f"would be written below {out}" in run("overlay", "build", "--wheel", wheel, "--out", str(out), "-n").out
    assert not out.exists()
    assert run("overlay", "build", "--sglang-dir", str(venv), "--out", str(out)).code == 0
    assert contents(out) == dict(PINS.built)
    for path in PINS.built:
        (site(venv) / path).write_bytes((out / path).read_bytes())
    assert run("overlay", "check", "--sglang-dir", str(venv)).out.endswith(f"{NAME}, byte-identical\n")
    shown = run("overlay", "diff", "--sglang-dir", str(site(venv) / "sglang"), "--json").json
    assert [(patch["sign"], patch["path"]) for patch in shown["patches"]] == [
        ("+" if path == NEW_FILE else "~", path) for path in sorted(PINS.built)
    ]
    # Stock content by cutting our insertions out: no wheel is needed.
    assert all(patch["diff"] for patch in shown["patches"])


def test_check_holds_a_plugin_version_to_its_contract(stock: Stock) -> None:
    checked = run("overlay", "check", "--sglang-dir", str(stock("0.5.23")))
    assert checked.code == 0 and "every symbol that it calls is there" in checked.out
