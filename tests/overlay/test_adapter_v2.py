"""The 0.5.23 adapter as far as it needs no SGLang: its commit, what it refuses, and the launch's confirmation."""

from __future__ import annotations

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_overlay.adapters import v2_settings, v2_worker
from sglang_overlay.confirm import Confirmation, confirm


def test_a_commit_puts_the_path_first_and_loses_no_slot() -> None:
    rng = random.Random(0)
    for n, steps in ((2, 2), (8, 6), (256, 16)):
        bs = 3
        lengths = torch.tensor([rng.randrange(1, min(steps, n) + 1) for _ in range(bs)])
        path = torch.full((bs, steps), -1)
        for i, length in enumerate(lengths.tolist()):
            path[i, :length] = torch.tensor([0, *sorted(rng.sample(range(1, n), length - 1))])
        table = torch.randperm(5 * 400).view(5, 400).to(torch.int32)
        before, rows, prefix = table.clone(), torch.tensor([4, 0, 2]), torch.tensor([7, 1, 30])
        window = torch.stack([before[row, at : at + n] for row, at in zip(rows.tolist(), prefix.tolist(), strict=True)]).long()
        ordered = v2_worker.commit(table, rows, prefix, window, path, lengths)
        for i, (row, at) in enumerate(zip(rows.tolist(), prefix.tolist(), strict=True)):
            kept = window[i, path[i, : lengths[i]]].tolist()
            rest = [slot for slot in window[i].tolist() if slot not in kept]
            assert table[row, at : at + n].tolist() == ordered[i].tolist() == kept + rest
            table[row, at : at + n] = before[row, at : at + n]
        assert torch.equal(table, before), "a slot outside the windows was touched"


def arguments(**given: Any) -> SimpleNamespace:
    plain: dict[str, Any] = dict.fromkeys(
        (
            "enable_dp_attention", "enable_lora", "lora_paths", "enable_hierarchical_cache", "enable_deterministic_inference",
            "enable_pdmux", "enable_two_batch_overlap", "speculative_adaptive", "speculative_use_block_verification",
            "page_size", "max_running_requests",
            "speculative_draft_window_size", "speculative_num_draft_tokens", "speculative_dflash_block_size", "speculative_eagle_topk",
            "speculative_draft_attention_backend",
        )
    )  # fmt: skip
    plain |= {"dp_size": 1, "pp_size": 1, "attn_cp_size": 1, "disaggregation_mode": "null", "device": "cuda", "attention": "triton"}
    plain |= {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0, "speculative_draft_model_path": "d"}
    return SimpleNamespace(**(plain | given))


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the one function of SGLang that is asked here, and no settings in the environment."""
    overrides = ModuleType("sglang.srt.arg_groups.overrides")
    overrides.attention_backends_of = lambda args: (args.attention, args.attention)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.arg_groups"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, overrides.__name__, overrides)
    for name in ("BUDGET", "TOPK", "BUDGET_TABLE"):
        monkeypatch.setenv(f"SGLANG_DDTREE_{name}", "")


def test_settings_are_resolved_from_flags_that_the_version_has() -> None:
    args = arguments(speculative_num_draft_tokens=64, speculative_eagle_topk=8)
    v2_settings.resolve(args, ["Qwen3ForCausalLM"], 16)
    assert (args.speculative_num_draft_tokens, args.speculative_dflash_block_size, args.speculative_eagle_topk) == (64, 16, 1)
    assert args.disable_overlap_schedule and args.page_size == 1 and args.speculative_draft_attention_backend == "triton"
    assert v2_settings.number(v2_settings.TOPK, 0) == 8
    args = arguments()
    v2_settings.resolve(args, ["LlamaForCausalLM"], None)
    assert (args.speculative_num_draft_tokens, args.speculative_dflash_block_size) == (32, 16)


@pytest.mark.parametrize(
    "given, flag",
    [
        ({"attention": "flashinfer"}, "--attention-backend`: flashinfer"),
        ({"attention": "fa3"}, "--attention-backend`: fa3"),
        ({"page_size": 16}, "--page-size`: 16"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"dp_size": 2}, "--enable-dp-attention"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"speculative_num_draft_tokens": 8}, "use 15 or more"),
        ({"speculative_dflash_block_size": 33}, "--speculative-dflash-block-size`: 33"),
    ],
)
def test_what_was_not_read_through_is_refused_by_name(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValueError) as refused:
        v2_settings.resolve(arguments(**given), ["Qwen3ForCausalLM"], 16)
    assert flag in str(refused.value)


def test_other_targets_and_budget_tables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DDTREE_BUDGET_TABLE", "1:63,8:15")
    with pytest.raises(ValueError) as refused:
        v2_settings.resolve(arguments(), ["GptOssForCausalLM"], 16)
    assert "GptOssForCausalLM" in str(refused.value) and "graphs have one width" in str(refused.value)


READY = "[2026-11-29 18:00:00 TP0] DDTREE ready: budgets [63, 15], self-test passed"


@pytest.mark.parametrize(
    "algorithm, log, want",
    [
        ("DDTREE", [READY], Confirmation(True, (63, 15))),
        ("DDTREE", ["DDTREE ready: budget 31, self-test passed"], Confirmation(True, (31,))),
        ("DFLASH", [READY], "the server's algorithm is DFLASH"),
        (None, [], "the server's algorithm is NONE"),
        ("DDTREE", ["The server is fired up and ready to roll!"], "the log has no line of the start-up self-test"),
        ("DDTREE", [READY, "SelfTestFailed: DDTREE start-up self-test failed (Triton, graph): a leak"], "DDTREE start-up self-test failed"),
        ("DDTREE", ["ValueError: DDTREE does not support:", READY], Confirmation(True, (63, 15))),
        (None, ["launch_server.py: error: argument --speculative-algorithm: invalid choice: 'DDTREE' (choose from"], "invalid choice"),
    ],
)
def test_a_launch_is_told_whether_ddtree_decodes(algorithm: str | None, log: list[str], want: Confirmation | str) -> None:
    found = confirm({"speculative_algorithm": algorithm} if algorithm else {}, log)
    if isinstance(want, str):
        assert not found.active and found.detail.startswith(want) and found.mend
    else:
        assert found == want
