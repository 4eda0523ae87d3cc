"""The command line that launch builds: golden lines, and every flag in them exists in the real SGLang's sources."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving import flags
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.launch.argv import Request, alike, build, degrees, unknown_flags
from tests.overlay.conftest import stock as stock

DDTREE = Request(model="/m", drafter="/d", budget="63")
TWO = replace(DDTREE, gpus=8, nodes=2, rendezvous="a:30500")

PLAIN = Request(model="/m", algorithm="none", gpus=8)
ATTENTION = replace(PLAIN, dp=8, extra=("--enable-dp-attention",))
THERE = "--nnodes 2 --node-rank {} --dist-init-addr a:30500"

GOLDEN = {
    "one": (replace(DDTREE, gpus=1), "--tp-size 1 TREE --speculative-ddtree-budget 63"),
    "two, auto": (replace(DDTREE, gpus=2, budget="auto"), "--tp-size 2 TREE"),
    "four, chain": (replace(DDTREE, gpus=4, algorithm="dflash"), "--tp-size 4 CHAIN"),
    "eight, plain": (PLAIN, "--tp-size 8"),
    "eight as 2 x 4": (replace(PLAIN, dp=2), "--tp-size 4 --dp-size 2"),
    "dp attention": (ATTENTION, "--tp-size 8 --dp-size 8 --enable-dp-attention"),
    "a table": (replace(DDTREE, budget="1:63,4:31"), "--tp-size 1 TREE --speculative-ddtree-budget-table 1:63,4:31"),
    "two nodes, first": (replace(TWO, rank=0), f"--tp-size 16 {THERE.format(0)} TREE --speculative-ddtree-budget 63"),
    "two nodes, second": (replace(TWO, rank=1), f"--tp-size 16 {THERE.format(1)} TREE --speculative-ddtree-budget 63"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_argv_is_the_golden_one(name: str) -> None:
    request, rest = GOLDEN[name]
    for short, algorithm in (("TREE", "DDTREE"), ("CHAIN", "DFLASH")):
        rest = rest.replace(short, f"--speculative-algorithm {algorithm} --speculative-draft-model-path /d")
    assert shlex.join(build(request).tail) == f"-m sglang.launch_server --model-path /m --host 127.0.0.1 --port 30000 {rest}"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.5.11", "0.5.23"])
def test_every_flag_exists_in_the_real_server_args(stock: Callable[[str], Path], version: str) -> None:
    site = stock(version)
    known = set(flags.known(str(site)))
    assert flags.version(str(site)) == version and len(known) > 300
    if version == "0.5.11":  # what the overlay adds is added by its one new file
        from sglang_overlay.build import build as build_overlay

        (added,) = [one for one in build_overlay(site, version) if one.path == flags.FILES[1]]
        ours = {word for word in ("--speculative-ddtree-budget", "--speculative-ddtree-budget-table") if f'"{word}"'.encode() in added.data}
        assert len(ours) == 2 and not ours & known
        known |= ours
    for request, _rest in GOLDEN.values():
        command = build(request, known)
        assert unknown_flags(command.tail, known) == (), (version, command.tail)
        if request.algorithm == "ddtree" and request.budget != "auto" and version == "0.5.23":
            assert set(command.env) & {"SGLANG_DDTREE_BUDGET", "SGLANG_DDTREE_BUDGET_TABLE"}
    assert unknown_flags(("-m", "x", "--no-such-flag", "1"), known) == ("--no-such-flag",)
    assert {"--tp-size", "--tensor-parallel-size", "--model", "--speculative-draft-model"} <= known


def test_the_standalone_server_takes_every_flag_that_we_give_it() -> None:
    from ddtree.server.__main__ import parser

    for request, expected in (
        (Request(engine="standalone", model="tiny", gpus=0, budget="24"), "--tiny --mode ddtree --budget 24 --device cpu"),
        (Request(engine="standalone", model="/m", algorithm="none"), "--model /m --mode plain"),
        (Request(engine="standalone", model="/m", drafter="/d", algorithm="dflash"), "--model /m --drafter /d --mode dflash"),
    ):  # fmt: skip
        tail = build(request).tail
        assert shlex.join(tail) == f"-m ddtree.server {expected} --host 127.0.0.1 --port 30000"
        parser().parse_args(tail[2:])


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(), "no model given"),
        (Request(model="/m"), "needs a drafter"),
        (replace(DDTREE, gpus=0), "needs a GPU"),
        (replace(DDTREE, gpus=8, tp=4), "uses 4 of 8 GPUs"),
        (replace(DDTREE, gpus=4, dp=3), "uses 3 of 4 GPUs"),
        (replace(DDTREE, budget="many"), "must be a number"),
        (replace(DDTREE, budget="0"), "must be a number"),
        (replace(DDTREE, engine="vllm"), "unknown engine"),
        (replace(DDTREE, port=70000), "between 1 and 65535"),
        (replace(DDTREE, extra=("--port", "31000")), "contradicts `--port 30000`"),
        (replace(DDTREE, extra=("--port=31000",)), "contradicts `--port 30000`"),
        (replace(DDTREE, extra=("--tensor-parallel-size", "2")), "contradicts `--tp-size 1`"),
        (replace(DDTREE, extra=("--model", "/other")), "contradicts `--model-path /m`"),
        (replace(DDTREE, extra=("--dp", "2")), "contradicts the options before it"),
        (Request(engine="standalone", model="tiny", gpus=2), "a CPU or one GPU"),
    ],
)
def test_what_does_not_fit_together_is_refused(request_: Request, words: str) -> None:
    with pytest.raises(UsageProblem, match=words.replace("(", r"\(")):
        build(request_)


def test_extra_arguments_go_through_verbatim_and_equal_ones_once() -> None:
    extra = ("--port", "30000", "--mem-fraction-static=0.8", "--cuda-graph-bs", "1", "2", "--tp", "1")
    tail = build(replace(DDTREE, extra=extra)).tail
    assert tail[-4:] == ("--mem-fraction-static=0.8", "--cuda-graph-bs", "1", "2")
    assert tail.count("--port") == 1 and "--tp" not in tail


def test_degrees() -> None:
    assert degrees(replace(DDTREE, gpus=8)) == (8, 1)
    assert degrees(replace(DDTREE, gpus=8, dp=4)) == (2, 4)
    assert degrees(replace(DDTREE, gpus=8, tp=4, dp=2)) == (4, 2)


def test_a_captured_command_line_is_replayed() -> None:
    """What `snapshot` saw of a server becomes a request that builds the same line, secrets left out."""
    for request, _rest in GOLDEN.values():
        if request.nodes == 1:
            tail = build(request).tail
            assert build(alike(tail, Request())).tail == tail
    tail = ("-m", "sglang.launch_server", "--model", "/m", "--tp", "4", "--api-key", "***", "--mem-fraction-static", "0.8")
    again = alike(tail, Request())
    assert (again.model, again.gpus, again.algorithm, again.extra) == ("/m", 4, "none", ("--mem-fraction-static", "0.8"))
    standalone = build(Request(engine="standalone", model="tiny", gpus=0, port=31000)).tail
    assert build(alike(standalone, Request())).tail == standalone
