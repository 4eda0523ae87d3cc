"""The tag lines: spelled as the drafts spell them, sorted for people, differing rows first."""

from __future__ import annotations

from ddtree_deploy import abi
from ddtree_deploy.abi import cuda, tags
from ddtree_deploy.abi.case import plain

SITE = {
    "host": {"python": {"tag": "cp312"}},
    "tree": {
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0"},
        "files": {
            "torch/lib/libtorch_cuda.so": {"archs": ["sm_75", "sm_100", "sm_120a", "compute_120"]},
            "torch/lib/libc10.so": {"undefined": ["_ZNSt7__cxx1112basic_stringE"]},
            "k/ops.so": {
                "needed": ["libc10.so", "libnuma.so.1", "libc.so.6"],
                "undefined": ["_ZN3c105ErrorEv"],
                "verneed": {"libc.so.6": ["GLIBC_2.17", "GLIBC_2.28"], "libstdc++.so.6": ["GLIBCXX_3.4.22"]},
            },
            "s/ops.so": {"needed": ["libtorch.so"], "undefined": ["aoti_torch_empty"]},
        },
    },
}


def test_lines_of_an_environment() -> None:
    assert tags.lines(abi.load(SITE, "ct129")) == (
        "abi_dependency :: torch :: 2.11",
        "ddtree :: cxx11_abi :: on",
        "ddtree :: glibc_floor :: 2.28",
        "ddtree :: glibcxx_floor :: 3.4.22",
        "ddtree :: needs_system :: libnuma.so.1",
        "ddtree :: needs_system :: libtorch.so",
        "ddtree :: python :: cp312",
        "ddtree :: torch_abi :: cxx",
        "ddtree :: torch_abi :: stable",
        "ddtree :: torch_build :: 2.11.0+cu130",
        "nvidia :: cuda_version_lower_bound :: 13.0",
        "nvidia :: cuda_version_upper_bound :: 14",
        "nvidia :: sm_arch :: 75_real",
        "nvidia :: sm_arch :: 100_real",
        "nvidia :: sm_arch :: 120_virtual",
        "nvidia :: sm_arch :: 120a_real",
    )


def test_rows_that_differ_come_first() -> None:
    site = abi.load(SITE, "a")
    other = abi.load({"host": {"python": {"tag": "cp311"}}}, "b")
    rows = tags.table(site, other, site)
    assert rows[0].differs and rows[0].target == "-"
    assert [row.differs for row in rows] == sorted((row.differs for row in rows), reverse=True)


def test_names_are_told_without_their_arguments() -> None:
    assert plain("_ZN3c1013MessageLogger6streamB5cxx11Ev") == "c10::MessageLogger::stream"
    assert plain("_ZNK3c106IValue7tagKindB5cxx11Ev") == "c10::IValue::tagKind"
    assert plain("_Z4initv") == "init"
    assert plain("cudaMalloc@libcudart.so.13") == "cudaMalloc@libcudart.so.13"
    assert plain("_ZN") == "_ZN" and plain("") == ""


def test_which_code_runs_on_which_gpu() -> None:
    serves = {
        "sm_80": [(8, 0), (8, 6), (8, 9)],
        "sm_90a": [(9, 0)],
        "sm_100": [(10, 0), (10, 3)],
        "sm_100f": [(10, 0), (10, 3)],
        "sm_120a": [(12, 0)],
        "sm_120f": [(12, 0), (12, 1)],
        "compute_90": [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)],
        "compute_90a": [(9, 0)],
        "nonsense": [],
    }
    gpus = [(7, 0), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
    assert {arch: [cc for cc in gpus if cuda.runs_on(arch, cc)] for arch in serves} == serves


def test_which_cuda_a_soname_belongs_to() -> None:
    assert cuda.soname_majors("libcublas.so.12") == (12,)
    assert cuda.soname_majors("libcusolver.so.12") == (13,)
    assert cuda.soname_majors("libcusparse.so.12") == (12, 13)
    assert cuda.soname_majors("libcudnn.so.9") == ()


def test_a_verdict_in_plain_lines() -> None:
    """One line a check, evidence below it, then the set, what no set mends, and the command."""
    pin = {"name": "vision", "version": "2", "requires": ["torch==2.11.0"]}
    torch = {"name": "torch", "version": "2.11.0", "requires": ["nothing-anywhere"]}
    source = abi.load({"tree": {"dists": [pin, torch]}}, "ct129")
    verdict = abi.judge(source, abi.load({}, "ct200"), ["vision"])
    text = "\n".join(abi.lines(verdict))
    assert "K9   block  metadata\n       ! vision 2 requires torch==2.11.0; the result lacks it" in text
    assert text.endswith("also torch 2.11.0 <- vision requires torch==2.11.0\nhint: ddtree-deploy push ct200 --only torch --only vision")
    assert "K11" in "\n".join(abi.lines(verdict, notes=True))
    full = abi.judge(source, abi.load({"host": {"disk": {"free_bytes": 1 << 20}}}, "b"), ["torch"], needed_bytes=1 << 30)
    assert [item.text for item in full.blocks] == ["b has 1 MiB free, the new generation takes 1024 MiB"]
    numa = {"files": {"k.so": {"needed": ["libnuma.so.1"]}}, "dists": [{"name": "k", "version": "1", "owns": ["k.so"]}]}
    system = {"cache": {"libnuma.so.1": "/lib/libnuma.so.1"}, "files": {"/lib/libnuma.so.1": {}}}
    verdict = abi.judge(abi.load({"tree": numa, "system": system}, "a"), abi.load({}, "b"), ["k"])
    assert "no set mends this: `k.so` of k 1 needs `libnuma.so.1`" in "\n".join(abi.lines(verdict))


def test_of_many_values_the_first_few_are_shown() -> None:
    many = " ".join(f"lib{number}.so" for number in range(13))
    few = "lib0.so lib1.so lib2.so lib3.so and 9 more"
    assert tags.TagRow("needs_system", many, "-", many).brief == (few, "-", few)
    assert tags.TagRow("sm_arch", "80 90 100", "80 90", "80 90 100").brief == ("… 100", "…", "… 100")
