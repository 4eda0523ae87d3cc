"""The ELF and fatbin readers: beside pyelftools on real libraries, on hand-made GPU code, on damaged bytes."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import elf, fatbin
from ddtree_deploy.agent.image import Image
from tests.abi.fatbins import container, entry, shared_object, shared_objects
from tests.abi.lab import GCC, Env

SITE = Path(os.__file__).parent / "lib-dynload"
HERE = Path(sys.executable).resolve()
needs_gcc = pytest.mark.skipif(GCC is None, reason="no gcc: the shared objects of these tests are compiled here")


def some_libraries() -> list[Path]:
    """A few dozen real objects of this machine: the interpreter, its modules, C and C++ libraries."""
    found = [HERE, *sorted(SITE.glob("*.so"))[:20]]
    for directory in (
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib64",
        "/usr/lib64",
        "/lib/aarch64-linux-gnu",
    ):
        for pattern in (
            "libc.so.6",
            "libm.so.6",
            "libstdc++.so.6",
            "libgcc_s.so.1",
            "libz.so.1",
            "libcrypto.so.*",
            "libpthread.so.0",
        ):
            found += sorted(Path(directory).glob(pattern))
    numpy = Path(next(iter(__import__("numpy").__path__)))
    found += [*sorted(numpy.parent.glob("numpy.libs/*"))[:3], *sorted(numpy.glob("**/_multiarray_umath*.so"))]
    return list(dict.fromkeys(path.resolve() for path in found if path.is_file()))


def by_pyelftools(path: Path) -> dict[str, Any]:
    """Read with pyelftools what `elf.read` reads."""
    with path.open("rb") as file:
        image = ELFFile(file)
        dynamic = image.get_section_by_name(".dynamic")
        out: dict[str, Any] = {
            "needed": [],
            "soname": None,
            "rpath": [],
            "runpath": [],
            "undefined": [],
            "weak": [],
            "defines": [],
        }
        if not isinstance(dynamic, DynamicSection):
            return out
        for tag in dynamic.iter_tags():
            if tag.entry.d_tag == "DT_NEEDED":
                out["needed"].append(tag.needed)
            elif tag.entry.d_tag == "DT_SONAME":
                out["soname"] = tag.soname
            elif tag.entry.d_tag == "DT_RPATH":
                out["rpath"] = tag.rpath.split(":")
            elif tag.entry.d_tag == "DT_RUNPATH":
                out["runpath"] = tag.runpath.split(":")
        need = image.get_section_by_name(".gnu.version_r")
        out["verneed"] = (
            {v.name: [aux.name for aux in auxiliaries if not aux.entry.vna_flags & 2] for v, auxiliaries in need.iter_versions()}
            if isinstance(need, GNUVerNeedSection)
            else {}
        )
        defined = image.get_section_by_name(".gnu.version_d")
        out["verdef"] = [next(aux).name for v, aux in defined.iter_versions() if not v.entry.vd_flags & 1] if defined else []
        for symbol in image.get_section_by_name(".dynsym").iter_symbols():
            bind, visible = symbol.entry.st_info.bind, symbol.entry.st_other.visibility
            if bind not in ("STB_GLOBAL", "STB_WEAK", "STB_LOOS") or not symbol.name:
                continue
            if symbol.entry.st_shndx == "SHN_UNDEF":
                out["weak" if bind == "STB_WEAK" else "undefined"].append(symbol.name)
            elif visible in ("STV_DEFAULT", "STV_PROTECTED") and symbol.name not in out["verdef"]:
                out["defines"].append(symbol.name)
        return out


@pytest.mark.parametrize("path", some_libraries(), ids=lambda path: path.name)
def test_pyelftools_reads_the_same(path: Path) -> None:
    ours, theirs = elf.read(str(path)), by_pyelftools(path)
    assert ours["problems"] == []
    for key in ("needed", "soname", "rpath", "runpath", "verneed", "verdef"):
        assert ours[key] == theirs[key], key
    for key in ("undefined", "weak"):
        assert sorted(name.partition("@")[0] for name in ours[key]) == sorted(theirs[key]), key
    # Symbols without a value, and those that a version script made local, are no definitions for the loader.
    missing = set(theirs["defines"]) - {name.partition("@")[0] for name in ours["defines"]}
    assert len(missing) <= len(theirs["defines"]) // 50, sorted(missing)[:10]
    assert {name.partition("@")[0] for name in ours["defines"]} <= set(theirs["defines"])


def test_the_interpreter_defines_the_c_api() -> None:
    names = set()
    for path in (HERE, *HERE.parent.parent.glob("lib/libpython3*.so*")):
        names |= set(elf.read(str(path))["defines"])
    assert {"Py_Initialize", "PyObject_Call"} <= names


@needs_gcc
def test_versions_default_and_hidden(tmp_path: Path) -> None:
    script = "V_1 { global: f; local: *; }; V_2 { global: g; } V_1;"
    path = Env(tmp_path / "e").so("libv.so.1", ["f", "g", "h"], soname="libv.so.1", versions=script)
    facts = elf.read(str(path))
    assert sorted(facts["defines"]) == ["f@@V_1", "g@@V_2"]
    assert facts["verdef"] == ["V_1", "V_2"]


@needs_gcc
def test_names_beyond_ascii_and_exports_left_out(tmp_path: Path) -> None:
    path = str(Env(tmp_path / "e").so("libn.so", ["naïve", "plain"], ["nowhere_ñ"]))
    facts = elf.read(path)
    assert {"naïve", "plain"} <= set(facts["defines"]) and "nowhere_ñ" in facts["undefined"]
    without = elf.read(path, exports=False)
    assert without["defines"] == [] and {**without, "defines": facts["defines"]} == facts


@needs_gcc
@pytest.mark.parametrize("header", [64, 80, 104, 112])
def test_architectures_of_hand_made_gpu_code(tmp_path: Path, header: int) -> None:
    section = container(["sm_80", "sm_90a"], header) + b"\0" * 40 + container(["sm_100f", "compute_120", "sm_120a"], header)
    path = shared_object(tmp_path / "k.so", section)
    facts = elf.read(str(path))
    assert facts["archs"] == ["sm_80", "sm_90a", "sm_100f", "sm_120a", "compute_120"]
    assert facts["problems"] == []


@needs_gcc
def test_relocatable_gpu_code_is_read_too(tmp_path: Path) -> None:
    path = shared_object(tmp_path / "k.so", container(["sm_89"]), name="__nv_relfatbin")
    assert elf.read(str(path))["archs"] == ["sm_89"]


@needs_gcc
def test_only_what_was_device_linked_counts(tmp_path: Path) -> None:
    """torch 2.9.1's libtorch_nvshmem.so: sm_89 and PTX were compiled, and lost in the device link."""
    objects = {"__nv_relfatbin": container(["sm_89", "compute_90"]), ".nv_fatbin": container(["sm_80", "sm_90"])}
    path = shared_objects(tmp_path / "k.so", objects)
    assert elf.read(str(path))["archs"] == ["sm_80", "sm_90"]


@needs_gcc
@pytest.mark.parametrize("section", [b"\1" * 64, container(["sm_80"])[:40], container([])], ids=["noise", "cut", "empty"])
def test_unreadable_gpu_code_is_unknown_not_absent(tmp_path: Path, section: bytes) -> None:
    facts = elf.read(str(shared_object(tmp_path / "k.so", section)))
    assert facts["archs"] is None
    assert any("gpu code unknown" in text for text in facts["problems"])


@needs_gcc
def test_no_gpu_code_is_none(env: Callable[[str], Env]) -> None:
    assert elf.read(str(env("e").so("plain.so", ["f"])))["archs"] == []


PIECES = st.one_of(
    st.binary(max_size=40),
    st.builds(container, st.lists(st.sampled_from(["sm_80", "compute_90", "sm_120a"]), max_size=3)),
    st.builds(entry, st.just("sm_90")),
)


# --- damaged bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Two small whole files: a versioned library, and one with GPU code."""
    if GCC is None:
        pytest.skip("no gcc: the shared objects of these tests are compiled here")
    root = tmp_path_factory.mktemp("victims")
    plain = Env(root / "e").so(
        "libv.so",
        ["f", "g"],
        ["getpid", "nowhere"],
        soname="libv.so",
        runpath="$ORIGIN",
        versions="V_1 { global: *; };",
    )
    kernels = shared_object(root / "k.so", container(["sm_80", "sm_90a"]) + container(["compute_120"]))
    return [plain.read_bytes(), kernels.read_bytes()]


def is_an_answer(facts: dict[str, Any]) -> bool:
    lists = ("needed", "rpath", "runpath", "defines", "undefined", "weak", "verdef", "problems")
    return all(isinstance(facts[key], list) for key in lists) and (facts["archs"] is None or isinstance(facts["archs"], list))


@settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_give_an_answer(victims: list[bytes], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Flipped bytes, overwritten words, cuts and zeroed tails: findings or facts, never an exception, never a hang."""
    content = bytearray(data.draw(st.sampled_from(victims)))
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(content) - 9))
        width = data.draw(st.sampled_from([1, 2, 4, 8]))
        value = data.draw(st.one_of(st.integers(0, 2 ** (8 * width) - 1), st.sampled_from([0, 2 ** (8 * width) - 1])))
        content[at : at + width] = value.to_bytes(width, "little")
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    if cut is not None:
        zeros = len(content) - cut if data.draw(st.booleans()) else 0
        content = content[:cut] + bytes(zeros)
    path = tmp_path_factory.getbasetemp() / "mutated.so"
    path.write_bytes(content)
    assert is_an_answer(elf.read(str(path), stamp=True))


@settings(max_examples=150, deadline=2000)
@given(section=st.lists(PIECES, max_size=6).map(b"".join), data=st.data())
def test_any_bytes_in_a_gpu_section_give_an_answer(tmp_path_factory: pytest.TempPathFactory, section: bytes, data: st.DataObject) -> None:
    content = bytearray(section)
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "section"
    path.write_bytes(content)
    found: set[str] = set()
    with path.open("rb") as file:
        image = object.__new__(Image)
        image.fd, image.size = file.fileno(), len(content)
        fatbin.walk(image, 0, len(content), found)
    assert all(fatbin.order(arch) for arch in found)


@settings(max_examples=100, deadline=2000)
@given(content=st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda tail: b"\x7fELF\x02\x01\x01" + tail)))
def test_any_bytes_give_an_answer(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.so"
    path.write_bytes(content)
    facts = elf.read(str(path))
    assert is_an_answer(facts) and (facts["problems"] or facts["kind"])


def test_every_cut_of_a_file_is_a_finding(victims: list[bytes], tmp_path: Path) -> None:
    """A partial copy never looks whole: wherever it ends, something is said."""
    whole = victims[0]
    path = tmp_path / "cut.so"
    for length in random.Random(0).sample(range(len(whole)), 200):
        path.write_bytes(whole[:length])
        assert elf.read(str(path))["problems"], length


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert elf.read(str(tmp_path / "absent.so"))["problems"] == ["unreadable: No such file or directory"]
    assert elf.read(str(tmp_path))["problems"] == ["unreadable: Is a directory"]
