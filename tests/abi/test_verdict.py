"""The reports of the field, replayed with real shared objects: judged from facts, pushed, and loaded for real."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from ddtree_deploy import abi
from ddtree_deploy.abi.case import Evidence
from tests.abi.lab import NEW, OLD, Env

MakeEnv = Callable[[str], Env]


def old_host(env: MakeEnv) -> Env:
    e = env("old")
    e.cuda12_host()
    return e


def new_host(env: MakeEnv, deep_gemm: bool = True) -> Env:
    e = env("new")
    e.cuda13_host(deep_gemm)
    return e


def text_of(verdict: abi.Verdict, check: str) -> str:
    return "\n".join(item.text for item in verdict.evidence if item.check == check)


def test_the_accident_is_refused_and_the_smallest_set_works(env: MakeEnv) -> None:
    """Sglang alone onto a cu12 tree blocks; the set that is named passes, and loads for real."""
    old, new = old_host(env), new_host(env)
    source, target = new.site("ct129"), old.site("ct200", [new])
    verdict = abi.judge(source, target, ["sglang"])
    assert not verdict.ok and verdict.level("K9") == "block"
    solution = verdict.solution
    assert solution is not None and solution.consistent
    cuda = ["nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"]
    assert list(solution.names) == ["deep-gemm", *cuda, "sglang", "sglang-kernel", "torch"]
    assert [step.name for step in solution.chain("nvidia-cuda-nvrtc")] == ["nvidia-cuda-nvrtc", "sglang-kernel"]
    assert solution.command("ct200") == (
        "ddtree-deploy push ct200 --only deep-gemm --only 'nvidia*' --only sglang --only sglang-kernel --only torch"
    )

    pushed = abi.judge(source, target, solution.names)
    assert pushed.ok, list(abi.lines(pushed))
    assert {name for name, _version, _why in pushed.removed} >= {
        "sgl-kernel",
        "nvidia-cuda-nvrtc-cu12",
        "torch",
        "deep-gemm",
    }
    old.overlay(new, pushed)
    for path in ("torch/_C.so", "sgl_kernel/common_ops.abi3.so", "deep_gemm/ops.so"):
        assert old.loads(path) == "ok"
    assert [item.text for item in abi.inspect(old.site("ct200")).blocks] == []


def test_roots_are_named_by_distribution_package_or_pattern(env: MakeEnv) -> None:
    """A profile says `sgl_kernel`; the distribution that owns it may be called otherwise."""
    source = new_host(env).site("ct129")
    assert abi.roots(source, ["sglang", "torch", "triton", "sgl_kernel"]) == ("sglang", "sglang-kernel", "torch")
    assert abi.roots(source, ["nvidia*"]) == ("nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")
    assert abi.roots(source, ["vllm"]) == ()


def test_every_member_of_the_set_is_needed(env: MakeEnv) -> None:
    """Drop any one of what the solver added, and the verdict blocks again."""
    old, new = old_host(env), new_host(env)
    source, target = new.site("ct129"), old.site("ct200", [new])
    solution = abi.smallest_set(source, target, ["sglang"])
    for step in solution.steps:
        rest = set(solution.names) - {step.name}
        assert not abi.judge(source, target, rest, solve_set=False).ok, step


def test_a_kernel_alone_is_told_symbol_library_and_provider(env: MakeEnv) -> None:
    """Rows 1, 2, 3: the evidence names the file, the symbol, and the distribution that has it on the source."""
    old, new = old_host(env), new_host(env)
    verdict = abi.judge(new.site("ct129"), old.site("ct200", [new]), ["sglang-kernel"])
    assert (verdict.level("K1"), verdict.level("K3")) == ("block", "block")
    assert "`sgl_kernel/common_ops.abi3.so` (sglang-kernel 0.4.2) needs `libnvrtc.so.13`" in text_of(verdict, "K1")
    assert "`nvidia/cu13/lib/libnvrtc.so.13` of nvidia-cuda-nvrtc 13.0.1" in text_of(verdict, "K1")
    assert "`c10::MessageLogger::stream`" in text_of(verdict, "K3")
    assert "torch 2.11.0+cu130" in text_of(verdict, "K3")
    old.overlay(new, verdict)
    assert old.loads("sgl_kernel/common_ops.abi3.so") != "ok"


def test_torch_without_its_kernels_names_the_untouched_that_break(env: MakeEnv) -> None:
    """Torch and nvidia replaced by hand: what nobody moved dies, and the source has no deep-gemm."""
    old, new = old_host(env), new_host(env, deep_gemm=False)
    source, target = new.site("ct129"), old.site("ct200", [new])
    moved = ["torch", "nvidia-cublas", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"]
    verdict = abi.judge(source, target, moved)
    assert not verdict.ok
    assert "`deep_gemm/ops.so` (deep-gemm 1.0, not moved) needs `libnvrtc.so.12`" in text_of(verdict, "K1")
    assert "which goes (the same library as nvidia-cuda-nvrtc 13.0.1, for another CUDA)" in text_of(verdict, "K1")
    solution = verdict.solution
    assert solution is not None and not solution.consistent
    assert any("deep_gemm/ops.so" in sentence for sentence in solution.unsolved)
    assert "sglang-kernel" in solution.names
    old.overlay(new, verdict)
    assert "libnvrtc.so.12" in old.loads("deep_gemm/ops.so")


def test_a_merged_tree_is_recognised(env: MakeEnv) -> None:
    """cu13 laid over cu12 by copying: metadata of the old, code of the new, both CUDAs."""
    old, new = old_host(env), new_host(env)
    old.lay_over(new)
    verdict = abi.inspect(old.site("ct200"))
    assert not verdict.ok
    assert "the metadata says torch 2.9.1, the code in `torch` says 2.11.0+cu130" in text_of(verdict, "K9")
    assert "`nvidia/cuda_nvrtc/lib/libnvrtc.so.12` of nvidia-cuda-nvrtc-cu12 12.0.1 is CUDA 12 beside torch 2.11.0+cu130" in text_of(
        verdict, "K2"
    )
    assert verdict.level("K2") == "block"
    assert "a merged tree, CUDA 13 over CUDA 12: torch 2.11.0+cu130 was laid over " in text_of(verdict, "K8")
    assert "libnvrtc.so.13" in old.loads("sgl_kernel/common_ops.abi3.so")
    assert old.loads("deep_gemm/ops.so") == "ok"


def test_the_sources_own_misses_are_the_baseline(env: MakeEnv) -> None:
    """A transport plugin that finds no MPI at home does not have to find it on the target."""
    source, target = env("source"), env("target")
    for e in (source, target):
        e.so("pkg/good.so", ["f"])
    ghost = env("ghost").so("libmpi.so.40", ["MPI_Abort"], soname="libmpi.so.40")
    source.so("pkg/mpi.so", uses=["MPI_Abort"], links=[ghost])
    source.dist("pkg", "2", ["pkg"])
    target.dist("pkg", "1", ["pkg"])
    verdict = abi.judge(source.site("a"), target.site("b", [source]), ["pkg"])
    assert verdict.ok and verdict.level("K1") == "ok"
    assert any(item.what == "baseline" for item in verdict.evidence)


def test_a_system_library_that_only_the_source_has(env: MakeEnv) -> None:
    """Row 15: nothing that moves brings it; the mend is a system package."""
    source, target = env("source"), env("target")
    system = env("usr")
    numa = system.so("libnuma.so.9", ["numa_go"], soname="libnuma.so.9")
    source.ld = [system.root]
    source.so("pkg/ops.so", uses=["numa_go"], links=[numa])
    source.dist("pkg", "2", ["pkg"])
    verdict = abi.judge(source.site("a"), target.site("b", [source]), ["pkg"])
    (block,) = verdict.blocks
    assert (block.check, block.what) == ("K1", "libnuma.so.9") and "install the system package" in block.mend
    assert verdict.solution is not None and verdict.solution.steps == () and not verdict.solution.consistent
    allowed = abi.judge(
        source.site("a"),
        target.site("b", [source]),
        ["pkg"],
        [abi.Allowance("K1", "libnuma.so.9", "installed tonight")],
    )
    assert allowed.ok and allowed.allowed == (("K1", "libnuma.so.9", "installed tonight"),)
    assert "(allowed: installed tonight)" in text_of(allowed, "K1")


def test_two_cuda_runtimes_in_one_process(env: MakeEnv) -> None:
    """Row 7: the missing runtime is found in the system, so everything links, and two runtimes share a process."""
    source, target = env("source"), env("target")
    for e, major, version in ((source, 12, OLD), (target, 13, NEW)):
        e.cuda(major)
        e.torch(version)
    runtime = source.root / "nvidia/cuda_runtime/lib/libcudart.so.12"
    source.so("ext/ops.so", uses=["cudartGo"], links=[runtime, source.root / "torch/lib/libtorch.so"])
    source.dist("ext", "1", ["ext"])
    system = env("usr")
    system.so("libcudart.so.12", ["cudartGo"], soname="libcudart.so.12")
    target.ld = [system.root]
    verdict = abi.judge(source.site("a"), target.site("b", [source]), ["ext"])
    assert verdict.level("K1") == "ok" and verdict.level("K2") == "block"
    assert "two CUDA runtimes" in text_of(verdict, "K2")
    target.overlay(source, verdict)
    assert target.loads("ext/ops.so") == "ok"


def test_a_library_that_record_names_and_nobody_has(env: MakeEnv) -> None:
    """Row 11: cuDNN's parts are opened by name; only RECORD knows that one is absent."""
    source, target = env("source"), env("target")
    source.so("nvidia/cudnn/lib/libcudnn.so.9", ["f"], soname="libcudnn.so.9")
    source.dist("nvidia-cudnn-cu13", "9.19", ["nvidia/cudnn/lib/libcudnn.so.9", "nvidia/cudnn/lib/libcudnn_adv.so.9"])
    verdict = abi.judge(source.site("a"), target.site("b"), ["nvidia-cudnn-cu13"])
    assert [item.check for item in verdict.blocks] == ["K8"]
    assert "lacks 1 of its files, `nvidia/cudnn/lib/libcudnn_adv.so.9` first" in text_of(verdict, "K8")


@pytest.mark.parametrize("damage", ["cut", "zero"])
def test_a_damaged_file_does_not_travel(env: MakeEnv, damage: str) -> None:
    source, target = env("source"), env("target")
    path = source.so("pkg/ops.abi3.so", ["f"])
    source.dist("pkg", "1", ["pkg"])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else whole[:4096].ljust(len(whole), b"\0"))
    verdict = abi.judge(source.site("a"), target.site("b"), ["pkg"])
    assert verdict.level("K8") == "block" and "pkg/ops.abi3.so" in text_of(verdict, "K8")


def test_a_verdict_survives_json(env: MakeEnv) -> None:
    old, new = old_host(env), new_host(env)
    verdict = abi.judge(new.site("ct129"), old.site("ct200", [new]), ["sglang"], [abi.Allowance.parse("K9:torch", "known")])
    data = abi.verdict_to_json(verdict)
    assert abi.verdict_from_json(json.loads(json.dumps(data))) == verdict
    assert data["solution"]["command"].startswith("ddtree-deploy push ct200 --only ")
    with pytest.raises(ValueError, match="schema"):
        abi.verdict_from_json({**data, "schema": 99})


@pytest.mark.parametrize(
    ("what", "covered"),
    [("libnvrtc.so.13", True), ("sgl_kernel/common_ops.abi3.so", True), ("common_ops", True), ("sglang-kernel", True),
     ("sgl_kernel/*", True), ("torch", False), ("nvidia-cuda-nvrtc", False), ("libcublas.so.13", False)],
)  # fmt: skip
def test_an_allowance_covers_what_is_wrong_and_not_who_provides_it(what: str, covered: bool) -> None:
    text = "`sgl_kernel/common_ops.abi3.so` (sglang-kernel 0.4.2) needs `libnvrtc.so.13`"
    text += "; on ct129 it comes from `nvidia/cu13/lib/libnvrtc.so.13` of nvidia-cuda-nvrtc 13.0.1"
    item = Evidence("K1", "block", "libnvrtc.so.13", text)
    assert abi.Allowance("K1", what).covers(item) is covered
    assert not abi.Allowance("K2", what).covers(item)


@pytest.mark.parametrize("text", ["", "K4", "K4:", ":x", "K99:x", "flash_ops"])
def test_allowances_are_parsed_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="CHECK:WHAT"):
        abi.Allowance.parse(text)
