"""Pure parts of a launch: signatures, phases of a start, what a recorded server amounts to, moments, the host's sources."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from ddtree_deploy.boot import agent_zip
from ddtree_deploy.commands.launch import moment
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.launch import phases, signatures
from ddtree_deploy.launch.profiles import from_capture, from_profile
from ddtree_deploy.launch.readiness import active_algorithm
from ddtree_deploy.launch.sources import collect
from ddtree_deploy.models import Manifest, PythonFacts, ServerCapture
from ddtree_deploy.render.launch import command_line

SERVING = Path(__file__).parents[2] / "ddtree_deploy/agent/serving"


@pytest.mark.parametrize("signature", signatures.signatures(), ids=lambda one: one.id)
def test_each_signature_finds_its_own_example_among_other_lines(signature: signatures.Signature) -> None:
    found = signatures.find(["loading", signature.example, "Traceback ended"], "ct200")
    assert found is not None and found.id == signature.id and found.line == signature.example.strip()
    assert found.text and not re.search(r"[{}]", found.text + found.mend) and "HOST" not in found.mend


def test_an_unknown_death_has_no_cause() -> None:
    assert signatures.find(["all is well", "INFO: Application shutdown complete"]) is None
    assert len({one.id for one in signatures.signatures()}) == len(signatures.signatures()) > 30


def test_a_start_is_followed_and_never_goes_back() -> None:
    seen = []
    phase = phases.Phase()
    for line in (
        "ddtree-deploy 2026-11-29T17:00:00Z: started pid 7\n",
        "[2026-11-29 17:00:09 TP0] Init torch distributed begin.\n",
        "[TP0] Load weight begin. avail mem=78.58 GB\nLoading safetensors checkpoint shards:  50% Completed | 1/2\n",
        "[TP1] Load weight begin. avail mem=78.58 GB\n[TP0] Load weight end.\n[TP0] KV Cache is allocated. #tokens: 65536\n",
        "[TP1] Load weight begin\n",
        "Capturing batches (bs=8 avail_mem=20.1 GB):  25%|##5  | 1/4\r",
        "max_total_num_tokens=65536, chunked_prefill_size=8192\n",
    ):
        phase = phases.follow(phase, line)
        seen.append((phase.name, phase.percent))
    assert seen == [
        ("import", -1), ("distributed", -1), ("weights", 50), ("KV cache", -1), ("KV cache", -1), ("graphs", 25), ("warm-up", -1),
    ]  # fmt: skip


def test_the_active_algorithm_is_what_the_server_says() -> None:
    assert active_algorithm({"mode": "plain"}) == "none" and active_algorithm({"mode": "ddtree"}) == "ddtree"
    assert active_algorithm({"speculative_algorithm": "DDTREE"}) == "ddtree"
    assert active_algorithm({"speculative_algorithm": None}) == "none" and active_algorithm({}) == ""


def manifest(capture: ServerCapture) -> Manifest:
    python = PythonFacts("3.12.3", "cpython", "cpython-312", ".so", "", False, False, "x86_64", "glibc 2.39")
    return Manifest("ct129", "/root/ml-env", python, (), (), servers=(capture,))


def test_a_captured_launch_moves_to_another_host() -> None:
    said = (
        "/root/ml-env/bin/python -m sglang.launch_server --model-path /models/q --tp-size 8 --speculative-algorithm DDTREE "
        "--speculative-draft-model-path /root/ml-env/drafter --speculative-ddtree-budget 63 --api-key *** --mem-fraction-static 0.8"
    )
    argv = tuple(said.split())
    env = {"NCCL_P2P_DISABLE": "1", "PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "0,1"}
    capture = ServerCapture(argv, env)
    request, notes = from_capture(capture, manifest(capture), "/opt/venv")
    assert (request.gpus, request.algorithm, request.budget, request.drafter) == (8, "ddtree", "63", "/opt/venv/drafter")
    assert request.env == {"NCCL_P2P_DISABLE": "1"} and request.extra == ("--mem-fraction-static", "0.8")
    assert len(notes) == 3 and "--api-key" in notes[1] and "CUDA_VISIBLE_DEVICES" in notes[2]
    with pytest.raises(UsageProblem, match="starts no server that launch knows"):
        from_capture(ServerCapture(("python", "train.py"), {}), manifest(capture), "/v")


def test_profiles() -> None:
    profiles = {"default": {"model": "/m", "gpus": 8}, "big": {"budget": 63, "flags": ("--a",), "env": {"A": "1"}}}
    assert from_profile(profiles, "") == {"model": "/m", "gpus": 8, "env": {}, "extra": ()}
    assert from_profile(profiles, "big") == {"budget": "63", "env": {"A": "1"}, "extra": ("--a",)}
    with pytest.raises(UsageProblem, match="no profile `bigg`, did you mean `big`"):
        from_profile(profiles, "bigg")
    assert from_profile({}, "") == {"env": {}, "extra": ()}


def test_a_command_line_is_quoted_and_shows_no_secret() -> None:
    line = command_line(("/v/bin/python", "-m", "x", "--prompt", "a b", "--api-key", "s3cret"), {"HF_TOKEN": "t0ken", "A": "1 2"})
    assert line == "A='1 2' HF_TOKEN='***' /v/bin/python -m x --prompt 'a b' --api-key '***'"


def test_moments() -> None:
    assert moment("", 100.0) is None and moment("90s", 100.0) == 10.0 and moment("2h", 7300.0) == 100.0
    assert moment("1970-01-01T00:01:00") == 60.0 and moment("1970-01-01T01:00:00+01:00") == 0.0
    with pytest.raises(UsageProblem, match="--since"):
        moment("yesterday")


def test_the_sources_that_travel_are_the_package_and_the_pair_only_when_served() -> None:
    digest, sent = collect(False)
    again, with_tiny = collect(True)
    assert digest != again and "ddtree/server/__main__.py" in sent and not any(name.endswith(".safetensors") for name in sent)
    assert {name for name in with_tiny if name.endswith(".safetensors")} and not any("__pycache__" in name for name in with_tiny)


@pytest.mark.parametrize("path", sorted(SERVING.glob("*.py")), ids=lambda path: path.name)
def test_what_runs_on_the_host_is_standard_library_for_python_3_9(path: Path) -> None:
    alone = path.name in ("supervisor.py", "nccl_child.py")
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            ours = name.startswith("ddtree_deploy.agent") and not alone
            torch = path.name == "nccl_child.py" and name.startswith("torch")
            assert ours or torch or name.split(".")[0] in sys.stdlib_module_names, f"{path.name}: imports {name}"


def test_servers_ride_only_in_the_sessions_that_need_them() -> None:
    plain, more = len(agent_zip()), len(agent_zip(("serving",)))
    assert b"serving/" not in agent_zip() and plain < more < plain + (48 << 10)
