"""`export --oci`: layers and digests, adding to a layout, refusals, and what an interrupted export leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from ddtree_deploy.errors import IntegrityFailure, Locked, NoSpace, UsageProblem
from ddtree_deploy.events import Event, Note, Progress
from ddtree_deploy.export.groups import OWN_LAYER, groups, interpreter
from ddtree_deploy.export.layout import Brought, Layout, brought
from ddtree_deploy.export.oci import _room_for, export_oci, plan_export
from ddtree_deploy.models import PATCHED
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.cli.conftest import run
from tests.export.conftest import Case, make_base, names, read_image, unpack
from tests.fixtures.trees import manifest
from tests.fixtures.venvs import BASE_PYTHON, contents, make_venv, package, site
from tests.fixtures.world import local

SITE = "opt/ddtree/site-packages"


def test_large_distributions_come_first_and_patched_ones_last() -> None:
    whole = manifest(("zeta", "1", {"zeta/a.so": "z"}), ("alpha", "1", {"alpha/a.so": "a"}), ("mid", "1", {"mid.py": "m"}),
                     ("hand", "1", {"hand.py": "h"}), loose={"stray.txt": "?"})  # fmt: skip
    sizes = {"zeta/a.so": OWN_LAYER, "alpha/a.so": OWN_LAYER}
    files = tuple(
        entry._replace(size=sizes.get(entry.path, entry.size), origin=PATCHED if entry.path == "hand.py" else entry.origin)
        for entry in whole.files
    )
    from dataclasses import replace

    made = groups(replace(whole, files=files))
    assert [group.name for group in made] == ["alpha", "zeta", "rest", "hand"]
    assert [entry.path for group in made for entry in group.files if "dist-info" not in entry.path] == [
        "alpha/a.so", "zeta/a.so", "mid.py", "stray.txt", "hand.py",
    ]  # fmt: skip
    assert sorted(entry.path for group in made for entry in group.files) == sorted(entry.path for entry in files)
    # The order in which a host listed its distributions is not part of it.
    turned = tuple(entry._replace(owner=3 - entry.owner) for entry in files if entry.owner >= 0)
    flipped = replace(whole, distributions=whole.distributions[::-1], files=turned)
    again = groups(flipped)
    assert [[entry.path for entry in group.files] for group in again if group.name != "rest"] == [
        [entry.path for entry in group.files] for group in made if group.name != "rest"
    ]


def test_only_takes_a_distribution_and_what_was_added_to_its_packages() -> None:
    whole = manifest(
        ("one", "1", {"one/__init__.py": ""}), ("two", "1", {"two/__init__.py": ""}), loose={"one/extra.py": "x", "stray.py": ""}
    )
    (made,) = groups(whole, ("one",))
    assert [e.path for e in made.files] == ["one-1.dist-info/METADATA", "one/__init__.py", "one/extra.py"]
    with pytest.raises(UsageProblem, match="no distribution `three`"):
        groups(whole, ("three",))
    assert interpreter(whole) == "python3.12"


def test_the_image_is_what_the_specification_says_and_holds_the_tree(case: Case, tmp_path: Path) -> None:
    done = export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="v1"))
    read = read_image(tmp_path / "img", "v1")
    assert [layer.name for layer in done.layers] == ["rest", "alpha"] and not done.already
    assert contents(unpack(read, tmp_path / "root") / SITE) == contents(site(case.venv))
    for at in range(2):
        for member in read.members(at).values():
            assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 315532800), member
            assert member.isdir() or member.issym() or member.mode in (0o644, 0o755)
    env = dict(item.split("=", 1) for item in read.config["config"]["Env"])
    assert env["PYTHONPATH"] == f"/{SITE}" and env["PATH"].startswith("/opt/ddtree/bin:")
    labels = read.config["config"]["Labels"]
    assert labels["ddtree-deploy.snapshot"] == labels["org.opencontainers.image.revision"] == case.snapshot
    # What a registry may show to strangers says nothing of the host that it came from.
    assert str(case.root) not in json.dumps([read.config, read.manifest])


def test_a_console_script_finds_its_interpreter_by_path(case: Case, tmp_path: Path) -> None:
    export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="v1"))
    root = unpack(read_image(tmp_path / "img", "v1"), tmp_path / "root")
    env = {"PATH": f"{BASE_PYTHON.parent}:/usr/bin:/bin", "PYTHONPATH": os.fspath(root / SITE)}
    ran = subprocess.run([root / "opt/ddtree/bin/beta"], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == "beta 1.0\n"


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_equal_content_has_an_equal_digest(case: Case, tmp_path: Path, compression: str) -> None:
    """Also from another venv at another time on another path: only the files count."""
    first = export_oci(case.store, case.snapshot, case.options(tmp_path / "a", tag="x", compression=compression))
    second = export_oci(case.store, case.snapshot, case.options(tmp_path / "b", tag="y", compression=compression))
    assert first.digest == second.digest
    assert len(read_image(tmp_path / "b", "y").tars) == 2


def test_a_distribution_has_the_same_layer_in_every_snapshot(case: Case, tmp_path: Path) -> None:
    """So that a registry stores it once. Another venv, another time, another neighbour: only the files count."""
    snapshots = []
    for number, neighbour in enumerate(("gamma", "delta")):
        venv = make_venv(tmp_path / f"v{number}" / "venv", package("beta", "1.0", modules=9), package(neighbour, "1.0"))
        (site(venv) / "beta/m0.py").write_text("OWN = 'by hand'\n")
        os.utime(site(venv) / "beta/m0.py", (number, number))
        # RECORD has the digest of a script that names the venv's path; all else of the distribution is equal.
        record = site(venv) / "beta-1.0.dist-info/RECORD"
        record.write_text("".join(line for line in record.read_text().splitlines(True) if "bin/" not in line))
        snapshots.append(take(local(venv), case.store, probe=False, allow_drift=True).ref.id)
    made = [export_oci(case.store, name, case.options(tmp_path / "img", tag=name[:9])) for name in snapshots]
    (one, other) = ({layer.name: layer for layer in done.layers} for done in made)
    assert one["beta"].new and not other["beta"].new and one["beta"].digest == other["beta"].digest
    assert one["rest"].digest != other["rest"].digest and made[0].digest != made[1].digest


def test_a_layout_is_added_to_and_a_second_run_changes_nothing(case: Case, tmp_path: Path) -> None:
    at = tmp_path / "img"
    at.mkdir()
    one = export_oci(case.store, case.snapshot, case.options(at, tag="one"))
    before = {path: (at / path).stat().st_mtime_ns for path in names(at) if (at / path).is_file()}
    again = export_oci(case.store, case.snapshot, case.options(at, tag="one"))
    assert again.already and again.digest == one.digest and again.new_bytes == 0
    assert {path: (at / path).stat().st_mtime_ns for path in names(at) if (at / path).is_file()} == before
    part = export_oci(case.store, case.snapshot, case.options(at, tag="part", only=("alpha",)))
    # The layer of the patched distribution is there already, so only the documents are new.
    assert [layer.new for layer in part.layers] == [True, False] or [layer.new for layer in part.layers] == [False]
    assert read_image(at, "one").config and read_image(at, "part").config
    moved = export_oci(case.store, case.snapshot, case.options(at, tag="one", only=("beta",)))
    assert moved.digest != one.digest and len(read_image(at, "one").tars) == 1
    assert [name for name in names(tmp_path) if "ddtree-export" in name] == []


def test_another_directory_is_left_alone(case: Case, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for at in (tmp_path / "mine", tmp_path / "mine/thesis.txt"):
        with pytest.raises(UsageProblem) as caught:
            export_oci(case.store, case.snapshot, case.options(at))
        assert "layout" in caught.value.mend
    for fields in ({"tag": "no good"}, {"tag": "../x"}, {"prefix": "relative"}, {"prefix": "/a/../b"}):
        with pytest.raises(UsageProblem):
            export_oci(case.store, case.snapshot, case.options(tmp_path / "new", **fields))
    assert names(tmp_path) == ["mine", "mine/thesis.txt"]


def test_a_dry_run_writes_nothing_and_tells_the_layers(case: Case, tmp_path: Path) -> None:
    plan = plan_export(case.store, case.snapshot, case.options(tmp_path / "deep/img"))
    assert [group.name for group in plan.groups] == ["rest", "alpha"] and not plan.adds
    assert names(tmp_path) == []


def test_a_damaged_object_stops_the_export_and_leaves_no_image(case: Case, tmp_path: Path) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "2.0", data=200_000))
    store = Store.open(tmp_path / "home")
    snapshot = take(local(venv), store, probe=False).ref.id
    payload = next(entry for entry in store.manifest(snapshot).files if entry.path.endswith("payload.bin"))
    victim = store.path(payload.digest)
    data = bytearray(victim.read_bytes())
    data[100_000] ^= 4
    victim.chmod(0o644)
    victim.write_bytes(data)
    with pytest.raises(IntegrityFailure, match="quarantine"):
        export_oci(store, snapshot, case.options(tmp_path / "img"))
    assert not victim.exists() and not (tmp_path / "img").exists()
    with pytest.raises(IntegrityFailure, match="missing from the store"):
        plan_export(store, snapshot, case.options(tmp_path / "img"))
    assert [name for name in names(tmp_path) if "ddtree-export" in name] == []


def test_an_export_that_was_killed_leaves_no_image_and_the_next_one_finishes(case: Case, tmp_path: Path) -> None:
    killed = f"""
import os, signal
from pathlib import Path
from ddtree_deploy.events import Progress
from ddtree_deploy.export.oci import ExportOptions, export_oci
from ddtree_deploy.store import Store
def emit(event):
    if isinstance(event, Progress) and event.done > 40_000:
        os.kill(os.getpid(), signal.SIGKILL)
export_oci(Store.open(Path({str(case.root / "home")!r})), {case.snapshot!r}, ExportOptions(Path({str(tmp_path / "img")!r}), "v1"), emit)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    assert not (tmp_path / "img").exists() and names(tmp_path), "it was killed in the middle"
    export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="v1"))
    assert read_image(tmp_path / "img", "v1").tars
    assert [path.name for path in tmp_path.iterdir()] == ["img"]


def test_two_exports_to_one_layout_at_once_one_is_told(case: Case, tmp_path: Path) -> None:
    told: list[Locked] = []

    def emit(event: Event) -> None:
        if isinstance(event, Progress) and not told:
            with pytest.raises(Locked) as caught:
                export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="second"))
            told.append(caught.value)

    export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="first"), emit)
    assert told and read_image(tmp_path / "img", "first")


def test_memory_does_not_grow_with_a_file(tmp_path: Path, case: Case) -> None:
    venv = make_venv(tmp_path / "venv", package("alpha", "2.0"))
    with (site(venv) / "alpha/huge.bin").open("wb") as file:
        file.truncate(96 << 20)
    store = Store.open(tmp_path / "home")
    snapshot = take(local(venv), store, probe=False, allow_drift=True).ref.id
    tracemalloc.start()
    try:
        export_oci(store, snapshot, case.options(tmp_path / "img", compression="gzip"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


def test_the_layers_of_a_base_come_first_and_its_configuration_stays(case: Case, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", {"etc/os-release": b"", f"usr/bin/{interpreter(case.store.manifest(case.snapshot))}": b""})
    notes: list[Event] = []
    done = export_oci(case.store, case.snapshot, case.options(tmp_path / "img", tag="v1", base=f"{base}:py:3"), notes.append)
    read = read_image(tmp_path / "img", "v1")
    assert len(read.tars) == 1 + len(done.layers) and "etc/os-release" in read.members(0)
    inner = read.config["config"]
    assert (inner["User"], inner["Cmd"]) == ("app", ["python3"])
    assert inner["Env"] == ["PATH=/opt/ddtree/bin:/usr/bin:/bin", "LANG=C.UTF-8", f"PYTHONPATH=/{SITE}:/app"]
    assert inner["Labels"]["org.opencontainers.image.base.digest"] == done.base
    assert read.manifest["layers"][0]["mediaType"] == "application/vnd.oci.image.layer.v1.tar+gzip"
    assert not [note for note in notes if isinstance(note, Note)]
    same = export_oci(case.store, case.snapshot, case.options(base, tag="v1", base=os.fspath(base) + ":py:3"))
    assert same.digest == done.digest, "an image may go into the layout of its base"


def test_a_base_that_can_not_run_it_is_told(case: Case, tmp_path: Path) -> None:
    old = b"\0GNU C Library (GNU libc) stable release version 2.17, by Roland McGrath et al.\n\0"
    base = make_base(tmp_path / "base", {"lib/ld-musl-x86_64.so.1": b"", "lib64/libc.so.6": old})
    notes: list[Event] = []
    export_oci(case.store, case.snapshot, case.options(tmp_path / "img", base=os.fspath(base)), notes.append)
    told = [note.text for note in notes if isinstance(note, Note)]
    assert len(told) == 3 and "python3" in told[0] and "musl" in told[1] and "glibc 2.17" in told[2]


@pytest.mark.parametrize("media", ["tar", "tar+gzip", "tar+zstd"])
def test_a_layer_that_can_not_be_read_brings_nothing(tmp_path: Path, media: str) -> None:
    for junk in (b"", b"\0" * 5000, b"\x28\xb5\x2f\xfd junk", b"\x1f\x8b junk", b"junk" * 1000):
        (tmp_path / "blob").write_bytes(junk)
        assert brought(tmp_path / "blob", f"application/vnd.oci.image.layer.v1.{media}") == Brought()


def test_a_base_that_is_damaged_or_not_there_is_refused(case: Case, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", {"etc/os-release": b"", f"usr/bin/{interpreter(case.store.manifest(case.snapshot))}": b""})
    for wrong, message in ((f"{base}:other", "has no image `other`"), (f"{tmp_path}/none", "not an OCI image layout")):
        with pytest.raises(UsageProblem, match=message):
            export_oci(case.store, case.snapshot, case.options(tmp_path / "img", base=wrong))
    largest = max((base / "blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    largest.write_bytes(largest.read_bytes() + b"!")
    with pytest.raises(IntegrityFailure, match="not what its digest says"):
        export_oci(case.store, case.snapshot, case.options(tmp_path / "img", base=os.fspath(base)))
    index = json.loads((base / "index.json").read_text())
    index["manifests"][0]["digest"] = "sha256:../../../../etc/passwd"
    (base / "index.json").write_text(json.dumps(index))
    with pytest.raises(IntegrityFailure, match="only sha256"):
        export_oci(case.store, case.snapshot, case.options(tmp_path / "img", base=os.fspath(base)))
    assert not (tmp_path / "img").exists()


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="needs"):
        _room_for(Layout(tmp_path), 1 << 60)


def test_the_command(case: Case, tmp_path: Path) -> None:
    env = {"DDTREE_HOME": os.fspath(case.root / "home")}
    at = os.fspath(tmp_path / "img")
    argv = ("export", "--oci", at, "--snapshot", case.snapshot)
    planned = run(*argv, "-n", env=env)
    assert planned.code == 0 and planned.out.splitlines()[0].split() == ["layer", "files", "size", "holds"]
    assert planned.out.splitlines()[-1] == f"would make {at}: image {case.snapshot[:12]} — snapshot {case.snapshot[:7]}, 2 layers"
    assert names(tmp_path) == []
    quiet = run(*argv, "-q", env=env)
    assert (quiet.code, quiet.err) == (0, "") and quiet.out.startswith("sha256:")
    result = run(*argv, "--json", env=env).lines[-1]
    assert result["type"] == "result" and result["image"]["digest"] == quiet.out.strip() and result["image"]["already"]
    spoken = run(*argv, "--tag", "second", env=env)
    assert spoken.out == (
        f"{at}: image second — snapshot {case.snapshot[:7]}, 2 layers, {spoken.out.split(', ')[2]}, "
        f"{spoken.out.split(', ')[3]}, {quiet.out}"
    )
