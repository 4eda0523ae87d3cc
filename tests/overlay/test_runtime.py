"""What runs inside SGLang, without SGLang: arguments, requests, trees, draws, the self-test, file checks."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ddtree.layout import ancestor_mask_batch
from ddtree.tree import build_tree
from sglang_overlay.runtime import args as ddtree_args
from sglang_overlay.runtime import serve
from sglang_overlay.runtime.args import Rung, parse_rungs, resolve_server_args
from sglang_overlay.runtime.draw import Draw, choose_tokens, seeded_gumbel
from sglang_overlay.runtime.plan import Head, Plan, best_tokens, make_trees, must_agree
from sglang_overlay.runtime.replay import Replay
from sglang_overlay.runtime.requests import refusing
from sglang_overlay.runtime.selftest import SelfTestFailed, self_test
from sglang_overlay.runtime.verify import append_walks, to_device


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_find_the_same_best_tokens_as_one(ranks: int) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 5, 8, generator=generator), torch.randn(64, 8, generator=generator)
    whole = best_tokens(hidden, Head(weight, 0, None), 9)
    shards = weight.chunk(ranks)
    sent: list[Tensor] = []
    for pass_ in range(2):
        for rank, shard in enumerate(shards):
            # The first pass collects what every rank sends, the second lets each rank receive all of it.
            gather = (lambda words: (sent.append(words), words[None])[1]) if pass_ == 0 else (lambda _: torch.stack(sent))
            got = best_tokens(hidden, Head(shard, rank * len(shard), gather), 9)
    assert torch.equal(got.ids, whole.ids)
    assert torch.allclose(got.logp, whole.logp, atol=1e-6)


def test_a_rank_with_another_tree_is_named_by_its_row() -> None:
    hidden, weight = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4)), torch.eye(8)
    mine = make_trees(hidden, torch.tensor([1, 2, 3]), torch.tensor([4, 4, 4]), Head(weight, 0, None), 6, 6)
    must_agree(mine, lambda words: torch.stack([words, words]))

    def other_rank(words: Tensor) -> Tensor:
        theirs = words.clone()
        theirs[2, 1] += 1
        return torch.stack([words, words, theirs])

    with pytest.raises(RuntimeError, match=r"rows \[2\]"):
        must_agree(mine, other_rank)


def test_trees_in_a_batch_are_those_of_the_library() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(3, 6, 16, generator=generator), torch.randn(40, 16, generator=generator)
    tokens, parents, n_valid, positions = make_trees(
        hidden, torch.tensor([4, 5, 6]), torch.tensor([10, 20, 30]), Head(weight, 0, None), 20, 20
    )
    for row in range(3):
        tree = build_tree((hidden[row] @ weight.T).log_softmax(dim=1), 20, root_token=4 + row)
        assert tokens[row].tolist() == list(tree.token_ids) and parents[row].tolist() == list(tree.parents)
        assert positions[row].tolist() == [10 * (row + 1) + depth for depth in tree.depths]
        assert int(n_valid[row]) == 21


def draw_for(
    bs: int,
    *,
    temperature: float = 1.0,
    top_k: int = 1 << 30,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | None = None,
) -> Draw:
    return Draw(
        torch.full((bs, 1), temperature),
        torch.full((bs,), top_k, dtype=torch.int32),
        torch.full((bs,), top_p),
        torch.full((bs,), min_p),
        top_k < 1 << 30 or top_p < 1 or min_p > 0,
        seeds,
    )


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86 32-bit of whole words with seed 0, from its published description."""
    word, state = 0xFFFFFFFF, 0
    for at in range(0, len(data), 4):
        k = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & word
        k = ((k << 15 | k >> 17) & word) * 0x1B873593 & word
        state = ((state ^ k) << 13 | (state ^ k) >> 19) & word
        state = state * 5 + 0xE6546B64 & word
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & word
    state = (state ^ state >> 13) * 0xC2B2AE35 & word
    return state ^ state >> 16


def test_seeded_noise_is_the_published_hash() -> None:
    seeds, positions = torch.tensor([0, 7, (5 << 40) + 3]), torch.tensor([0, 12, 70000])
    noise = seeded_gumbel(seeds, positions, 5)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for column in range(5):
            text = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            uniform = torch.tensor(murmur3_32(text), dtype=torch.float64) / 0xFFFFFFFF
            assert torch.equal(noise[row, column], -torch.log(-torch.log(uniform)))


def test_seeded_draws_do_not_depend_on_batch_tree_or_node() -> None:
    logits = torch.randn(3, 6, 50, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[9, 10, 10, 11, 11, 12]]).repeat(3, 1) + torch.tensor([[0], [40], [7]])
    seeds = torch.tensor([11, 12, 13])
    together = choose_tokens(logits, positions, draw_for(3, temperature=0.7, seeds=seeds))
    for row in range(3):
        for node in range(6):
            # Plain decoding: one request, one position, its logits and the noise of that position.
            noise = seeded_gumbel(seeds[row : row + 1], positions[row : row + 1, node], 50)[0]
            alone = (torch.softmax(logits[row, node] / 0.7, dim=0).log().double() + noise).argmax()
            assert int(together[row, node]) == int(alone)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.7, "min_p": 0.05}])
@pytest.mark.parametrize("seeded", [True, False])
def test_draws_follow_the_targets_filtered_distribution(limits: dict[str, float], seeded: bool) -> None:
    torch.manual_seed(4)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    count, nodes = 10000, 2
    seeds = torch.arange(count) if seeded else None
    positions = torch.tensor([17, 18]).repeat(count, 1)
    draw = draw_for(count, temperature=0.9, seeds=seeds, **limits)
    drawn = choose_tokens(logits.repeat(count, nodes, 1), positions, draw).flatten()
    count *= nodes
    probs = torch.softmax(logits / 0.9, dim=0)
    rank = torch.arange(8)
    keep = (rank < limits.get("top_k", 8)) & (probs.cumsum(0) - probs <= limits.get("top_p", 1.0))
    keep &= probs >= limits.get("min_p", 0.0) * probs[0]
    want = torch.where(keep, probs, 0.0) / probs[keep].sum()
    seen = torch.bincount(drawn, minlength=8)
    assert not seen[~keep].any()
    expected = want[keep] * count
    chi_square = float(((seen[keep] - expected) ** 2 / expected).sum())
    assert chi_square < 30, f"{seen.tolist()} against {expected.tolist()}"  # p < 1e-4 at 7 degrees of freedom


def test_greedy_requests_in_a_sampled_batch_get_the_argmax() -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(2))
    draw = draw_for(2, top_k=1)
    assert torch.equal(choose_tokens(logits, torch.zeros(2, 4, dtype=torch.int64), draw), logits.argmax(dim=2))


class Req(SimpleNamespace):
    """As much of SGLang's request as a commit touches."""

    def __init__(self, room: int) -> None:
        super().__init__(output_ids=[9], room=room, spec_verify_ct=0, spec_accepted_drafts=0, kv_committed_len=5, kv_allocated_len=5)

    def check_finished(self) -> None:
        self.done = len(self.output_ids) >= self.room

    def finished(self) -> bool:
        return self.done

    def update_spec_acceptance_histogram(self, accepted: int) -> None:
        self.accepted = accepted


def test_a_commit_keeps_the_path_and_frees_the_rest_also_when_it_stops_inside() -> None:
    reqs = [Req(99), Req(3), Req(99)]
    packed = [[0, 2, 5, -1, 11, 12, 13, -1, 3], [0, 1, 3, -1, 21, 22, 23, -1, 3], [0, -1, -1, -1, 31, -1, -1, -1, 1]]
    commit = append_walks(reqs, packed, 6)
    assert [r.output_ids for r in reqs] == [[9, 11, 12, 13], [9, 21, 22], [9, 31]]
    assert (commit.lengths, commit.last_tokens) == ([3, 2, 1], [13, 22, 31])
    assert commit.keep == [0, 2, 5, 6, 7, 12]
    assert sorted(commit.keep + commit.free) == list(range(18))
    assert [r.kv_committed_len for r in reqs] == [8, 7, 6]
    assert [t.tolist() for t in to_device(commit, "cpu")] == [
        commit.lengths,
        commit.last_tokens,
        commit.keep,
        commit.free,
    ]


def attention(how: str) -> object:
    """Return a verify forward: one layer of attention over token embeddings, with the mask read `how`."""
    embed = torch.randn(64, 16, generator=torch.Generator().manual_seed(6))

    def verify(plan: Plan, lengths: tuple[int, ...]) -> Tensor:
        n = plan.width
        seq_lens = torch.tensor(lengths)
        flat = plan.mask(seq_lens, int(seq_lens.sum()))
        out, start = [], 0
        for row, length in enumerate(lengths):
            mask = flat[start : start + n * (length + n)].view(n, length + n)
            start += n * (length + n)
            if how == "chain":
                mask = torch.ones_like(mask).tril(length)
            elif how == "everything":
                mask = torch.ones_like(mask)
            elif how == "itself":
                mask = torch.eye(n, dtype=torch.bool)
                mask = torch.cat((torch.ones(n, length, dtype=torch.bool), mask), dim=1)
            x = embed[torch.cat((torch.zeros(length, dtype=torch.int64), plan.tokens[row]))]
            scores = (x[length:] @ x.T / 16).masked_fill(~mask, -torch.inf)
            out.append(scores.softmax(dim=1) @ x @ embed.T)
        return torch.stack(out)

    return verify


@pytest.mark.parametrize("width", [3, 4, 5, 8, 64])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_self_test_passes_a_tree_and_trips_on_every_other_mask(width: int, batch: int) -> None:
    self_test(attention("tree"), width, 64, batch, "cpu", "test")
    for how in ("chain", "everything"):
        with pytest.raises(SelfTestFailed, match=r"moves logits outside its branch.*--attention-backend triton"):
            self_test(attention(how), width, 64, batch, "cpu", "test")
    if width > 3:
        with pytest.raises(SelfTestFailed, match="does not reach"):
            self_test(attention("itself"), width, 64, batch, "cpu", "test")


def test_a_plans_mask_is_the_ancestors_behind_an_open_prefix() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 3], [-1, 0, 1, 2, 0]])
    zeros = torch.zeros_like(parents)
    plan = Plan(zeros, parents, torch.tensor([5, 5]), zeros, 4)
    flat = plan.mask(torch.tensor([2, 3]), 5)
    first, second = flat[:35].view(5, 7), flat[35:].view(5, 8)
    ancestors = ancestor_mask_batch(parents, 4)
    assert first[:, :2].all() and second[:, :3].all()
    assert torch.equal(first[:, 2:], ancestors[0]) and torch.equal(second[:, 3:], ancestors[1])


def test_files_that_do_not_belong_together_are_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "edited.py").write_text("x = 1\n")
    (tmp_path / "read.py").write_text("y = 1\n")
    digest = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("edited.py", "read.py")}
    monkeypatch.setattr(serve, "EDITED_FILES", {"edited.py": digest["edited.py"]})
    monkeypatch.setattr(serve, "READ_FILES", {"read.py": digest["read.py"]})
    serve.check_files(tmp_path)
    (tmp_path / "read.py").write_text("y = 2\n")
    with caplog.at_level(logging.WARNING):
        serve.check_files(tmp_path)
    assert "read.py" in caplog.text
    (tmp_path / "edited.py").unlink()
    with pytest.raises(RuntimeError, match=r"edited\.py.*push the overlay again"):
        serve.check_files(tmp_path)


def test_a_batch_above_the_captured_sizes_runs_eagerly() -> None:
    double = Replay(lambda x: (x * 2,), (torch.zeros(4),), [])
    assert double(torch.arange(9))[0].tolist() == [2 * i for i in range(9)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replayed_trees_equal_eager_ones() -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(300, 16, generator=generator).cuda()

    def trees(hidden: Tensor, roots: Tensor, seq_lens: Tensor) -> tuple[Tensor, ...]:
        return make_trees(hidden, roots, seq_lens, Head(weight, 0, None), 31, 31)

    most = (
        torch.zeros(4, 7, 16).cuda(),
        torch.zeros(4, dtype=torch.int64).cuda(),
        torch.ones(4, dtype=torch.int64).cuda(),
    )
    replay = Replay(trees, most, [1, 2, 4])
    for bs in (1, 3, 4, 6):
        inputs = (torch.randn(bs, 7, 16).cuda(), torch.arange(bs).cuda(), torch.arange(5, 5 + bs).cuda())
        for mine, theirs in zip(replay(*inputs), trees(*inputs), strict=True):
            assert torch.equal(mine, theirs)
