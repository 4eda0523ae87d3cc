"""What runs inside SGLang, without SGLang: trees on all ranks, commits, the self-test, file checks, replayed graphs."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ddtree.layout import ancestor_mask_batch
from ddtree.tree import build_tree
from sglang_overlay.runtime import serve
from sglang_overlay.runtime.plan import Head, Plan, best_tokens, make_trees, must_agree
from sglang_overlay.runtime.replay import Replay
from sglang_overlay.runtime.selftest import SelfTestFailed, self_test
from sglang_overlay.runtime.verify import append_walks, to_device


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
        commit.keep + commit.free,
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
