"""The closure beside the loader of this machine: for every arrangement, what it says is what dlopen does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddtree_deploy import abi
from tests.abi.lab import Env

MakeEnv = Callable[[str], Env]


def agree(env: Env, *paths: str) -> list[bool]:
    """Assert that the closure and the loader agree on each path; return what both say."""
    known = abi.closure(env.site("here"))
    said = {path: known.loads(path) for path in paths}
    done = {path: env.loads(path) for path in paths}
    assert said == {path: answer == "ok" for path, answer in done.items()}, (done, known.files, known.torch)
    return [said[path] for path in paths]


def test_rpath_is_inherited_and_runpath_is_not(env: MakeEnv) -> None:
    """a -> b -> c, where only a knows c's directory."""
    e = env("e")
    c = e.so("far/libc1.so", ["c"], soname="libc1.so")
    b = e.so("near/libb1.so", ["b"], ["c"], [c], soname="libb1.so")
    e.so("a_rpath.so", uses=["b"], links=[b], rpath="$ORIGIN/near:$ORIGIN/far")
    e.so("a_runpath.so", uses=["b"], links=[b], runpath="$ORIGIN/near:$ORIGIN/far")
    assert agree(e, "a_rpath.so", "a_runpath.so") == [True, False]


def test_ld_library_path_loses_to_rpath_and_wins_over_runpath(env: MakeEnv) -> None:
    """Row 10: a decoy that lacks the symbol stands in LD_LIBRARY_PATH."""
    e = env("e")
    good = e.so("lib/libx1.so", ["x_new"], soname="libx1.so")
    e.so("by_rpath.so", uses=["x_new"], links=[good], rpath="$ORIGIN/lib")
    e.so("by_runpath.so", uses=["x_new"], links=[good], runpath="$ORIGIN/lib")
    decoy = env("decoy")
    decoy.so("libx1.so", ["x_old"], soname="libx1.so")
    e.ld = [decoy.root]
    assert agree(e, "by_rpath.so", "by_runpath.so") == [True, False]
    evidence = [item for item in abi.inspect(e.site("here")).evidence if item.check == "K15"]
    assert any(str(decoy.root) in item.text and "libx1.so" in item.text for item in evidence)


def test_runpath_turns_rpath_of_the_same_file_off(env: MakeEnv) -> None:
    e = env("e")
    leaf = e.so("lib/liby1.so", ["y"], soname="liby1.so")
    mid = e.so("mid/libm1.so", ["m"], ["y"], [leaf], soname="libm1.so", runpath="$ORIGIN/nowhere")
    e.so("top.so", uses=["m"], links=[mid], rpath="$ORIGIN/mid:$ORIGIN/lib")
    assert agree(e, "top.so", "mid/libm1.so") == [False, False]


def test_versions_must_be_defined_by_the_library_that_is_found(env: MakeEnv) -> None:
    e = env("e")
    new = env("new").so("libv1.so", ["f"], soname="libv1.so", versions="V_2 { global: f; };")
    e.so("libv1.so", ["f"], soname="libv1.so", versions="V_1 { global: f; };")
    e.so("wants.so", uses=["f"], links=[new], runpath="$ORIGIN")
    assert agree(e, "wants.so", "libv1.so") == [False, True]
    misses = abi.closure(e.site("here")).files["wants.so"]
    assert [(miss.kind, miss.item) for miss in misses] == [("version", "V_2 of libv1.so")]


def test_a_library_without_versions_answers_any(env: MakeEnv) -> None:
    e = env("e")
    new = env("new").so("libv1.so", ["f"], soname="libv1.so", versions="V_2 { global: f; };")
    e.so("libv1.so", ["f"], ["getpid"], soname="libv1.so")
    e.so("wants.so", uses=["f"], links=[new], runpath="$ORIGIN")
    assert agree(e, "wants.so") == [True]


def test_a_library_without_even_a_version_table_is_refused(env: MakeEnv) -> None:
    """glibc asserts in `check_match` and ends the process."""
    e = env("e")
    new = env("new").so("libv1.so", ["f"], soname="libv1.so", versions="V_2 { global: f; };")
    e.so("libv1.so", ["f"], soname="libv1.so")
    e.so("wants.so", uses=["f"], links=[new], runpath="$ORIGIN")
    assert agree(e, "wants.so") == [False]


def test_weak_symbols_and_missing_ones(env: MakeEnv) -> None:
    e = env("e")
    e.so(
        "weak.so",
        asm="extern int nowhere(void) __attribute__((weak));\nint probe(void) { return nowhere ? nowhere() : 0; }",
    )
    e.so("strong.so", uses=["nowhere"])
    assert agree(e, "weak.so", "strong.so") == [True, False]
    raw = e.site("here").tree.objects["weak.so"].raw
    assert raw["weak"] == ["nowhere"] and "nowhere" not in raw["undefined"]


def test_truncated_and_zero_tailed_files_are_findings(env: MakeEnv) -> None:
    e = env("e")
    whole = e.so("whole.so", ["f"]).read_bytes()
    (e.root / "cut.so").write_bytes(whole[: len(whole) // 2])
    (e.root / "zero.abi3.so").write_bytes(whole[:4096].ljust(len(whole), b"\0"))
    (e.root / "empty.so").write_bytes(b"")
    (e.root / "script.so").write_text("INPUT(-lm)\n")
    objects = e.site("here").tree.objects
    assert "truncated" in str(objects["cut.so"].damaged)
    assert "zero-filled" in str(objects["zero.abi3.so"].damaged)
    assert objects["empty.so"].damaged == "empty file"
    assert "script.so" not in objects
    assert agree(e, "whole.so", "cut.so", "zero.abi3.so") == [True, False, False]


@pytest.mark.parametrize("layout", ["cu12", "cu13", "merged"])
def test_preloads_decide_what_an_extension_without_rpath_finds(env: MakeEnv, layout: str) -> None:
    """Rows 3 and 4, and the accident: in a merged tree the old layout wins, and the new library is there in vain."""
    e = env("e")
    if layout != "cu13":
        e.cuda(12)
    if layout != "cu12":
        e.cuda(13)
    e.torch("2.9.1+cu128" if layout == "cu12" else "2.11.0+cu130")
    for major in (12, 13):
        donor = env(f"donor{major}")
        donor.cuda(major)
        library = next(donor.root.glob(f"nvidia/*/lib/libnvrtc.so.{major}"))
        e.so(f"ext{major}.so", uses=["nvrtcGo"], links=[library])
    assert (
        agree(e, "torch/_C.so", "ext12.so", "ext13.so")
        == {
            "cu12": [True, True, False],
            "cu13": [True, False, True],
            "merged": [True, True, False],
        }[layout]
    )


def test_torch_that_can_not_load_says_so_once(env: MakeEnv) -> None:
    e = env("e")
    e.cuda(13)
    e.torch("2.11.0+cu130")
    (e.root / "torch/lib/libc10.so").unlink()
    assert agree(e, "torch/_C.so") == [False]
    assert {miss.item for miss in abi.closure(e.site("here")).torch} == {"libc10.so"}


def test_libraries_of_the_wrong_machine_are_passed_over(env: MakeEnv) -> None:
    e = env("e")
    good = e.so("good/libz1.so", ["z"], soname="libz1.so")
    wrong = bytearray(good.read_bytes())
    wrong[18] = 183  # EM_AARCH64
    (e.root / "wrong").mkdir()
    (e.root / "wrong/libz1.so").write_bytes(wrong)
    e.so("top.so", uses=["z"], links=[good], runpath="$ORIGIN/wrong:$ORIGIN/good")
    assert agree(e, "top.so") == [True]
