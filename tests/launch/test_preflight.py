"""What is said before a launch: facts of a host in, checks with mends out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddtree_deploy.launch import preflight
from ddtree_deploy.launch.argv import Request, build
from ddtree_deploy.models import Check

H200 = {"name": "NVIDIA H200", "cc": "9.0", "memory": 144 << 30, "free": 143 << 30}
TARGET = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096, "vocab_size": 151936, "num_hidden_layers": 36}
DRAFTER = {"architectures": ["DFlashDraftModel"], "hidden_size": 4096, "vocab_size": 151936, "num_target_layers": 36, "block_size": 16,
           "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}  # fmt: skip
REQUEST = Request(model="/m", drafter="/d", gpus=2)
FLAGS = ["--model-path", "--host", "--port", "--tp-size", "--dp-size", "--speculative-algorithm", "--speculative-draft-model-path",
         "--speculative-ddtree-budget"]  # fmt: skip


def facts(**changed: Any) -> dict[str, Any]:
    """Return the facts of a host on which REQUEST would run, but for what is changed."""
    return {
        "python": {"version": "3.12.3"}, "venv": "/v", "tree": "/v/t", "generation": 3,
        "gpus": [{"index": index, **H200} for index in range(2)], "sglang": "0.5.11", "flags": FLAGS, "overlay": True, "plugin": None,
        "router": False, "ddtree": False, "missing": [], "archs": {"sgl_kernel/sm90/common_ops.so": ["sm_90a"]},
        "model": {"name": "/m", "path": "/m", "config": TARGET, "hub": False},
        "drafter": {"name": "/d", "path": "/d", "config": DRAFTER, "hub": False},
        "ports": [[30000, True, ""]], "disk": {"free_bytes": 1 << 40}, "mount": {"fs": "ext4", "options": ["rw"]}, "orphans": [],
        "servers": [], **changed,
    }  # fmt: skip


def bad(found: dict[str, Any], request: Request = REQUEST) -> dict[str, Check]:
    checks = preflight.judge(found, request, build(request, found["flags"]))
    assert all(check.mend and not check.mend.endswith(".") for check in checks if check.level != "ok")
    return {check.id: check for check in checks if check.level != "ok"}


def gpus(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"index": index, **H200, **change} for index, change in enumerate(changes)]


def test_a_host_that_can_do_it() -> None:
    assert bad(facts()) == {}
    said = preflight.judge(facts(), REQUEST, build(REQUEST, FLAGS))
    assert any("2 x NVIDIA H200 (sm_90)" in check.text for check in said)


@pytest.mark.parametrize(
    ("changed", "name", "level", "words"),
    [
        ({"gpus": []}, "gpus", "block", "no GPU is there, 2 are wanted"),
        ({"gpus": gpus({})}, "gpus", "block", "1 GPU is there, 2 are wanted"),
        ({"gpus": gpus({}, {"name": "NVIDIA A100", "cc": "8.0"})}, "gpus", "warn", "not alike"),
        ({"gpus": gpus({}, {"free": 5 << 30})}, "memory", "block", "1 GPU is in use already"),
        ({"gpus": gpus({}, {"free": 100 << 30})}, "memory", "warn", "in use already"),
        ({"gpus": gpus({"cc": "12.0"}, {"cc": "12.0"})}, "arch", "block", "no code for a GPU of compute capability 12.0"),
        ({"model": {"name": "/m", "path": None, "config": None, "hub": False}}, "model", "block", "no directory `/m`"),
        ({"model": {"name": "/m", "path": "/m", "config": None, "hub": False}}, "model", "block", "no readable config.json"),
        ({"model": {"name": "a/b", "path": None, "config": None, "hub": True}}, "model", "warn", "will fetch it"),
        ({"model": {"name": "a/b", "path": None, "config": None, "hub": True, "offline": True}}, "model", "block", "HF_HUB_OFFLINE"),
        ({"ports": [[30000, False, "pid 7: nginx"]]}, "port", "block", "port 30000 is taken"),
        ({"orphans": [{"pid": 9, "ppid": 1, "command": "sglang::scheduler_TP0", "devices": 3}]}, "orphan", "block", "has GPUs open"),
        ({"orphans": [{"pid": 9, "ppid": 1, "command": "sglang::detokenizer", "devices": 0}]}, "orphan", "warn", "pid 9 is left"),
        ({"overlay": False}, "overlay", "block", "does not know DDTREE"),
        ({"sglang": "", "flags": []}, "engine", "block", "no SGLang in the live tree"),
        ({"flags": FLAGS[:-3]}, "flags", "block", "does not know 2 flags"),
        ({"mount": {"fs": "ext4", "options": ["noexec"]}}, "caches", "block", "noexec"),
        ({"mount": {"fs": "nfs4", "options": []}}, "caches", "warn", "NFS"),
        ({"disk": {"free_bytes": 1 << 30}}, "caches", "warn", "1.0 GiB free"),
    ],
)
def test_what_stands_in_the_way(changed: dict[str, Any], name: str, level: str, words: str) -> None:
    found = bad(facts(**changed))
    assert name in found and found[name].level == level and words in found[name].text, found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 2560}, "hidden size: model 4096, drafter 2560"),
        ({"vocab_size": 32000}, "vocabulary: model 151936, drafter 32000"),
        ({"num_target_layers": 28}, "the model has 36, the drafter was made for 28"),
        ({"dflash_config": {"target_layer_ids": [1, 40]}}, "reads layers [1, 40] of a model with 36"),
        ({"block_size": 64}, "block size 64"),
    ],
)
def test_a_pair_that_does_not_belong_together(change: dict[str, Any], words: str) -> None:
    found = bad(facts(drafter={"name": "/d", "path": "/d", "config": {**DRAFTER, **change}, "hub": False}))
    assert list(found) == ["pair"] and words in found["pair"].evidence[0]
    alone = replace(REQUEST, algorithm="none")
    assert bad(facts(drafter={"name": "/d", "path": None, "config": None, "hub": False}), alone) == {}


def test_one_kernel_library_that_serves_is_enough() -> None:
    archs = {
        "sgl_kernel/sm90/common_ops.so": ["sm_90a"],
        "sgl_kernel/sm100/common_ops.so": ["sm_100a"],
        "torch/lib/libtorch_cuda.so": ["sm_90"],
    }
    assert bad(facts(archs=archs)) == {}
    assert "torch/lib/libtorch_cuda.so" in bad(facts(archs={**archs, "torch/lib/libtorch_cuda.so": ["sm_80a"]}))["arch"].evidence


def test_the_gpus_that_are_chosen() -> None:
    found = facts(gpus=gpus({}, {"free": 1 << 30}, {}))
    assert "memory" in bad(found)
    assert bad(found, replace(REQUEST, env={"CUDA_VISIBLE_DEVICES": "2,0"})) == {}


def test_derived_ports() -> None:
    assert preflight.ports(REQUEST) == [30000]
    spread = replace(REQUEST, gpus=8, dp=8, extra=("--enable-dp-attention",))
    assert preflight.ports(spread) == [30000, *range(30233, 30239)]
    assert preflight.ports(replace(REQUEST, nodes=2, rendezvous="a:30500")) == [30000, 30500]
    assert preflight.ports(replace(REQUEST, nodes=2, rank=1, rendezvous="a:30500")) == [30000]


def test_the_standalone_server_needs_its_packages() -> None:
    request = Request(engine="standalone", model="tiny", gpus=0)
    found = facts(missing=["fastapi", "uvicorn"], flags=[], model={"name": "tiny", "path": None, "config": None, "hub": False})
    assert (
        "fastapi, uvicorn" in bad(found, request)["engine"].text and "--with fastapi --with uvicorn" in bad(found, request)["engine"].mend
    )
    assert "Python 3.11" in bad({**found, "python": {"version": "3.10.2"}}, request)["engine"].text
