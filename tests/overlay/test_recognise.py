"""What a tree's SGLang is, from digests alone, and what a push makes of it: no wheel, no host."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddtree_deploy import overlay
from ddtree_deploy.errors import Incompatible, IntegrityFailure, UsageProblem
from ddtree_deploy.models import PATCHED, STOCK, UNOWNED, Distribution, FileEntry, ImportProof
from ddtree_deploy.patches import Patch, Tree, of_directory, of_wheel, parse_record, patches
from sglang_overlay.edits.v0_5_11 import NEW_FILE
from sglang_overlay.manifest import pinned
from tests.cli.conftest import run

PINS = pinned("0.5.11")
SCHEDULER = "sglang/srt/managers/scheduler.py"


def sglang(version: str = "0.5.11") -> tuple[Distribution, ...]:
    other = Distribution("torch", "2.11.0", "torch-2.11.0.dist-info", packages=("torch",))
    return (other, Distribution("sglang", version, f"sglang-{version}.dist-info", packages=("sglang",)))


def entries(*changed: FileEntry, without: Iterable[str] = ()) -> list[FileEntry]:
    stock = {**PINS.base, **PINS.reads, SCHEDULER: "5" * 64}
    files = {path: FileEntry(path, "f", 0o644, 1, digest, STOCK, 1) for path, digest in stock.items()}
    files |= {entry.path: entry for entry in changed}
    return sorted(entry for path, entry in files.items() if path not in without)


def ours() -> list[FileEntry]:
    """Return the built files as a snapshot classifies them."""
    return [
        FileEntry(path, "f", 0o644, 1, digest, UNOWNED if path == NEW_FILE else PATCHED, -1 if path == NEW_FILE else 1)
        for path, digest in PINS.built.items()
    ]


def by_hand(path: str, owner: int = 1) -> FileEntry:
    return FileEntry(path, "f", 0o644, 1, "f" * 64, PATCHED if owner >= 0 else UNOWNED, owner)


def said(files: list[FileEntry], version: str = "0.5.11") -> str:
    found = overlay.carried(sglang(version), files)
    assert found is not None
    return found.text


def test_a_tree_says_what_its_sglang_is() -> None:
    name = f"ddtree overlay {PINS.overlay_id[:7]}"
    assert said(entries()) == "sglang 0.5.11, stock"
    assert said(entries(*ours())) == f"sglang 0.5.11 + {name}, byte-identical"
    assert said(entries(by_hand(SCHEDULER))) == f"sglang 0.5.11, 1 file patched by somebody else: {SCHEDULER}"
    mixed = said(entries(*ours(), by_hand(SCHEDULER), by_hand("sglang/mine.py", -1)))
    assert mixed == f"sglang 0.5.11 + {name}, byte-identical, 2 files patched by somebody else: sglang/mine.py, {SCHEDULER}"
    assert said(entries(*ours(), without=[NEW_FILE])) == "sglang 0.5.11 + parts of the ddtree overlay"
    assert said(entries(*ours(), by_hand(NEW_FILE, -1))).startswith("sglang 0.5.11 + parts of the ddtree overlay, 1 file patched")
    assert said(entries(), "0.5.12.post1") == "sglang 0.5.12.post1, stock"
    assert said(entries(by_hand(SCHEDULER)), "9.9").endswith(f"patched by somebody else: {SCHEDULER}")
    assert overlay.carried(sglang()[:1], entries()) is None


def laid() -> overlay.Overlay:
    files = tuple(FileEntry(path, "f", 0o644, 7, digest, PATCHED, -1) for path, digest in PINS.built.items())
    return overlay.Overlay("0.5.11", PINS.overlay_id, files, {})


def test_the_overlay_is_laid_over_stock_files_as_files_of_sglang() -> None:
    files, identity = overlay.lay_over(sglang(), entries(), [laid()])
    assert identity == PINS.overlay_id
    built = {entry.path: entry for entry in files if entry.path in PINS.built}
    assert {path: entry.digest for path, entry in built.items()} == dict(PINS.built)
    assert {(entry.owner, entry.origin) for entry in built.values()} == {(1, PATCHED)}
    assert len(files) == len(entries()) + 1 and list(files) == sorted(files)
    assert overlay.lay_over(sglang(), files, []) == (files, identity)  # there already: nothing to build from is needed
    assert overlay.reads_checks(sglang(), files) == ()
    dependency = next(iter(PINS.reads))
    (check,) = overlay.reads_checks(sglang(), entries(by_hand(dependency)))
    assert (check.level, check.evidence) == ("warn", (dependency,))


def test_anything_but_the_pinned_base_is_refused_by_name() -> None:
    changed = next(iter(PINS.base))
    with pytest.raises(IntegrityFailure, match="1 of 5 files would be others") as refused:
        overlay.lay_over(sglang(), entries(by_hand(changed)), [laid()])
    assert refused.value.causes == (f"{changed}: {'f' * 64}, expected {PINS.base[changed]}",)
    with pytest.raises(IntegrityFailure) as stray:
        overlay.lay_over(sglang(), entries(by_hand(NEW_FILE, -1)), [laid()])
    assert stray.value.causes == (f"{NEW_FILE}: {'f' * 64}, expected no such file",)
    with pytest.raises(IntegrityFailure) as missing:
        overlay.lay_over(sglang(), entries(without=[changed]), [laid()])
    assert missing.value.causes[0].startswith(f"{changed}: missing, expected")
    with pytest.raises(IntegrityFailure, match="not in the store"):
        overlay.lay_over(sglang(), entries(), [])
    with pytest.raises(UsageProblem, match="no sglang"):
        overlay.lay_over(sglang()[:1], entries(), [laid()])
    with pytest.raises(Incompatible, match="its route is `plugin`"):
        overlay.lay_over(sglang("0.5.12.post1"), entries(), [laid()])


def proof(module: str, error: str = "") -> ImportProof:
    return ImportProof(module, not error, 0.1, error)


def test_an_import_of_ours_counts_where_stock_sglang_imports() -> None:
    assert overlay.excused([overlay.MODULE]) == set()
    assert overlay.excused([overlay.MODULE, overlay.SIBLING, "torch"]) == {overlay.MODULE, overlay.SIBLING}
    assert overlay.probes([NEW_FILE]) == overlay.PROBES and overlay.probes(["sglang/__init__.py"]) == ()
    found = overlay.carried(sglang(), entries(*ours()))
    assert found is not None
    fine = overlay.live_checks(found, [proof(module) for module in overlay.PROBES])
    assert [check.level for check in fine] == ["ok", "ok"] and "understands its flags" in fine[1].text
    skipped = overlay.live_checks(found, [proof(module, "ModuleNotFoundError: No module named 'torch'") for module in overlay.PROBES])
    assert [check.level for check in skipped] == ["ok", "warn"] and "No module named 'torch'" in skipped[1].text
    broken = overlay.live_checks(found, [proof(overlay.SIBLING), proof(overlay.MODULE, "SyntaxError"), proof(overlay.FLAGS)])
    assert len(broken) == 1  # the import itself is the failed proof


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_patches_are_diffs_against_what_record_vouches_for(tmp_path: Path) -> None:
    stock = {"p/a.py": b"one\ntwo\n", "p/b.py": b"x\n", "p/c.bin": b"\xff\x00", "p/gone.py": b"bye\n", "p/same.py": b"s\n"}
    rows = [(path, base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()) for path, data in stock.items()]
    lines = [f"{path},sha256={value},1" for path, value in rows]
    record = parse_record("\n".join([*lines, "p-1.dist-info/RECORD,,", "../../bin/p,sha256=AAAA,3", "p/__pycache__/a.pyc,,"]).encode())
    assert record == {path: digest(data) for path, data in stock.items()}
    now = {"p/a.py": b"one\n2\n", "p/b.py": b"y", "p/c.bin": b"\xff\x01", "p/same.py": b"s\n", "p/new.py": b"n\n"}
    tree = Tree("p", "1", record, {path: digest(data) for path, data in now.items()}, now.get)
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in stock.items():
            archive.writestr(path, b"another build\n" if path == "p/b.py" else data)
    found = {patch.path: patch for patch in patches(tree, [of_wheel(wheel)])}
    assert [(patch.sign, path) for path, patch in found.items()] == [
        ("~", "p/a.py"), ("~", "p/b.py"), ("~", "p/c.bin"), ("-", "p/gone.py"), ("+", "p/new.py"),
    ]  # fmt: skip
    assert found["p/a.py"].diff == "--- stock/p/a.py\n+++ p/a.py\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n"
    assert found["p/b.py"] == Patch("~", "p/b.py", None)  # the wheel's content is not what RECORD vouches for
    assert found["p/c.bin"].diff == "binary files stock/p/c.bin and p/c.bin differ\n"
    assert [line for line in (found["p/gone.py"].diff or "").splitlines() if line.startswith("-b")] == ["-bye"]


def test_the_commands_that_need_no_sglang() -> None:
    listed = run("overlay", "list", "--json").json
    first = listed["overlays"][0]
    assert (first["version"], first["files"], first["overlay"]) == ("0.5.11", 5, PINS.overlay_id)
    nothing = run("overlay", "check")
    assert nothing.code == 2 and "the store has no snapshots" in nothing.err
    assert run("overlay", "build", "--wheel", "/nowhere/sglang-0.5.11-py3-none-any.whl").code == 2


@pytest.mark.parametrize("raw", [b"a.py,sha256=x,1\n", b'"' + b"a" * 200_000 + b",sha256=AAAA,1", b"a.py,sha256=\xff\xff,\n"])
def test_a_damaged_record_is_said_to_be_one(raw: bytes) -> None:
    with pytest.raises(UsageProblem, match="a RECORD is damaged"):
        parse_record(raw)


def test_what_the_wheel_brought_beside_its_package_is_not_missing(tmp_path: Path) -> None:
    files = {"sglang/a.py": b"a = 1\n", "tools/tag.py": b"tag = 1\n"}
    for path, data in files.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(data)
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode() for path, data in files.items()}
    (tmp_path / "sglang-0.5.11.dist-info").mkdir()
    (tmp_path / "sglang-0.5.11.dist-info/RECORD").write_text("".join(f"{path},sha256={digest},7\n" for path, digest in digests.items()))
    assert list(patches(of_directory(tmp_path, "0.5.11"), [])) == []
    (tmp_path / "tools/tag.py").write_bytes(b"tag = 2\n")
    assert [(patch.sign, patch.path) for patch in patches(of_directory(tmp_path, "0.5.11"), [])] == [("~", "tools/tag.py")]
