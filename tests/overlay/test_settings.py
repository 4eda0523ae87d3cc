"""What a user may ask of DDTREE inside SGLang: server arguments and requests, those taken and those refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_overlay.runtime import args as ddtree_args
from sglang_overlay.runtime.args import Rung, parse_rungs, resolve_server_args
from sglang_overlay.runtime.requests import refusing


@pytest.fixture
def server(tmp_path: Path) -> SimpleNamespace:
    """Return resolved server arguments that DDTREE accepts, as SGLang 0.5.11 names them."""
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 16, "rope_parameters": {"rope_theta": 5e5}}))
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen3ForCausalLM"]), vocab_size=151936, context_len=40960)
    return SimpleNamespace(
        attention_backend="triton",
        get_attention_backends=lambda: ("triton", "triton"),
        get_model_config=lambda: config,
        model_config=config,
        speculative_algorithm="DDTREE",
        speculative_ddtree_budget=63,
        speculative_ddtree_topk=None,
        speculative_ddtree_budget_table=None,
        speculative_num_draft_tokens=None,
        speculative_dflash_block_size=None,
        speculative_dflash_draft_window_size=None,
        speculative_draft_model_path=str(tmp_path),
        speculative_draft_model_revision=None,
        speculative_num_steps=None,
        speculative_eagle_topk=None,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        trust_remote_code=False,
        json_model_override_args="{}",
        max_running_requests=None,
        enable_mixed_chunk=True,
        disable_overlap_schedule=False,
        disable_cuda_graph=False,
        cuda_graph_bs=[1, 2, 4, 8, 16, 32, 48],
        cuda_graph_max_bs=48,
        enable_dp_attention=False,
        enable_lora=None,
        lora_paths=None,
        enable_hierarchical_cache=False,
        enable_deterministic_inference=False,
        enable_pdmux=False,
        enable_two_batch_overlap=False,
        page_size=1,
        pp_size=1,
        attn_cp_size=1,
        disaggregation_mode="null",
        kv_cache_dtype="auto",
        device="cuda",
    )


def test_resolving_sizes_the_tree_and_the_drafter_keeps_its_block(server: SimpleNamespace) -> None:
    resolve_server_args(server)
    assert (server.speculative_num_draft_tokens, server.speculative_dflash_block_size) == (64, 16)
    assert (server.speculative_num_steps, server.speculative_eagle_topk, server.max_running_requests) == (1, 1, 48)
    assert server.disable_overlap_schedule and not server.enable_mixed_chunk
    # 64 tokens of 151 936 fp32 logits and 40 960 context positions: 62 MB a request, 4 GiB hold 68 of them.
    assert server.cuda_graph_bs == [1, 2, 4, 8, 16, 32, 48]
    draft = SimpleNamespace(**vars(server))
    ddtree_args.narrow_draft_args(draft)
    assert (draft.speculative_algorithm, draft.speculative_num_draft_tokens, draft.speculative_eagle_topk) == (
        "DFLASH",
        16,
        1,
    )
    assert json.loads(draft.json_model_override_args) == {"rope_theta": 5e5}


def test_a_users_override_of_the_rope_base_wins(server: SimpleNamespace) -> None:
    resolve_server_args(server)
    server.json_model_override_args = '{"rope_theta": 7.0}'
    ddtree_args.narrow_draft_args(server)
    assert json.loads(server.json_model_override_args) == {"rope_theta": 7.0}


def test_a_wide_tree_gets_graphs_only_for_batches_that_fit(server: SimpleNamespace) -> None:
    server.speculative_ddtree_budget = 255
    resolve_server_args(server)
    assert server.cuda_graph_bs == [1, 2, 4, 8, 16] and server.cuda_graph_max_bs == 16
    assert server.ddtree_draft_graph_bs == [1, 2, 4, 8, 16, 32, 48]


def test_a_table_gives_each_budget_its_batch_sizes(server: SimpleNamespace) -> None:
    server.speculative_ddtree_budget, server.speculative_ddtree_budget_table = None, "1:63, 4:31, 16:7"
    resolve_server_args(server)
    assert server.ddtree_graph_bs == {63: [1], 31: [2, 4], 7: [8, 16, 32, 48]}
    assert server.cuda_graph_bs == [1] and server.speculative_num_draft_tokens == 64


def test_fa3_needs_a_topk_above_one(server: SimpleNamespace) -> None:
    server.get_attention_backends = lambda: ("fa3", "fa3")
    resolve_server_args(server)
    assert server.speculative_eagle_topk == 2


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"page_size": 16}, ("`--page-size`: 16", "use `--page-size 1`")),
        ({"pp_size": 2}, ("`--pipeline-parallel-size`: 2", "use `--pipeline-parallel-size 1`")),
        ({"attn_cp_size": 2}, ("`--attention-context-parallel-size`: 2",)),
        ({"enable_dp_attention": True}, ("`--enable-dp-attention`: on", "leave it out")),
        ({"enable_lora": True}, ("`--enable-lora`: on",)),
        ({"lora_paths": ["x"]}, ("`--enable-lora`: on",)),
        ({"enable_hierarchical_cache": True}, ("`--enable-hierarchical-cache`: on",)),
        ({"enable_deterministic_inference": True}, ("`--enable-deterministic-inference`: on",)),
        ({"enable_two_batch_overlap": True}, ("`--enable-two-batch-overlap`: on",)),
        ({"enable_pdmux": True}, ("`--enable-pdmux`: on",)),
        ({"disaggregation_mode": "decode"}, ("`--disaggregation-mode`: decode",)),
        ({"speculative_accept_threshold_single": 0.9}, ("`--speculative-accept-threshold-single`: 0.9", "lossless")),
        (
            {"get_attention_backends": lambda: ("fa3", "triton")},
            ("fa3, decode triton", "use one `--attention-backend`"),
        ),
        ({"get_attention_backends": lambda: ("fa4", "fa4")}, ("`--attention-backend`: fa4", "triton, flashinfer, fa3")),
        (
            {"get_attention_backends": lambda: ("fa3", "fa3"), "kv_cache_dtype": "fp8_e4m3"},
            ("`--kv-cache-dtype`: fp8_e4m3",),
        ),
        ({"device": "xpu"}, ("`--device`: xpu",)),
        ({"speculative_dflash_draft_window_size": 512}, ("`--speculative-dflash-draft-window-size`: 512",)),
        ({"speculative_draft_model_path": None}, ("`--speculative-draft-model-path`: None", "give its path")),
        ({"speculative_num_draft_tokens": 16}, ("`--speculative-num-draft-tokens`: 16", "budget+1 = 64")),
        ({"speculative_dflash_block_size": 64}, ("`--speculative-dflash-block-size`: 64", "use 2 to 32")),
        ({"speculative_ddtree_budget": 0}, ("`--speculative-ddtree-budget`: 0", "nodes excluding the root")),
        ({"speculative_ddtree_topk": 0}, ("`--speculative-ddtree-topk`: 0",)),
        ({"speculative_ddtree_budget_table": "1:7"}, ("exclude each other",)),
    ],
)
def test_every_refusal_names_flag_value_and_remedy(server: SimpleNamespace, changes: dict[str, object], words: tuple[str, ...]) -> None:
    vars(server).update(changes)
    with pytest.raises(ValueError) as caught:
        resolve_server_args(server)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "architecture",
    ["GptOssForCausalLM", "Qwen3NextForCausalLM", "DeepseekV3ForCausalLM", "Qwen3VLForConditionalGeneration", "Other"],
)
def test_targets_without_a_tree_form_are_refused(server: SimpleNamespace, architecture: str) -> None:
    server.model_config.hf_config.architectures = [architecture]
    with pytest.raises(ValueError, match=f"`--model-path`: {architecture}: .*; use one of Llama"):
        resolve_server_args(server)


def test_all_refusals_come_at_once(server: SimpleNamespace) -> None:
    server.page_size, server.pp_size = 16, 2
    with pytest.raises(ValueError, match=r"(?s)--page-size.*|--pipeline"):
        resolve_server_args(server)
    assert len(list(ddtree_args.refusals(server))) == 2


@pytest.mark.parametrize("table", ["", "8", "a:b", "2:7,1:15", "1:7,1:15", "0:7", "1:0", "1:5000", "1:2:3"])
def test_a_bad_table_is_refused_by_name(table: str) -> None:
    with pytest.raises(ValueError, match="--speculative-ddtree-budget-table"):
        parse_rungs(None, table)


def test_a_table_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "table").write_text("1:63\n8:15\n")
    assert parse_rungs(None, str(tmp_path / "table")) == (Rung(63, 1), Rung(15, None))


def test_the_flags_parse() -> None:
    parser = argparse.ArgumentParser()
    ddtree_args.add_cli_args(parser)
    flags = [
        "--speculative-ddtree-budget",
        "7",
        "--speculative-ddtree-topk",
        "4",
        "--speculative-ddtree-budget-table",
        "1:7",
    ]
    parsed = vars(parser.parse_args(flags))
    assert parsed == {
        "speculative_ddtree_budget": 7,
        "speculative_ddtree_topk": 4,
        "speculative_ddtree_budget_table": "1:7",
    }


def request(**changes: object) -> SimpleNamespace:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(sampling_params=SimpleNamespace(**{**neutral, **changes}), custom_logit_processor=None)


def test_requests_that_could_not_stay_lossless_are_refused() -> None:
    check = refusing(lambda req: "theirs" if hasattr(req, "bad") else None)
    assert check(request()) is None
    for name, value in (
        ("frequency_penalty", 0.1),
        ("presence_penalty", 1),
        ("repetition_penalty", 1.1),
        ("min_new_tokens", 3),
    ):
        answer = check(request(**{name: value}))
        assert answer is not None and f"`{name}`: {value}" in answer and "leave it at" in answer
    processed = request()
    processed.custom_logit_processor = "..."
    assert "custom_logit_processor" in str(check(processed))
    theirs = request(frequency_penalty=1.0)
    theirs.bad = True
    assert check(theirs) == "theirs"
