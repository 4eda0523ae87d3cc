"""Play rounds of DDTREE in SGLang's own allocator, request table and verify input, on the CPU.

Run with a patched site: `pool_rounds.py SITE WIDTH ROUNDS`. Real are the edited `dflash_info.py` and `spec_info.py`, the built
`ddtree_utils.py`, and SGLang's `allocator.py`; what those import and never reach here is left empty, and the two
launches of Triton kernels are written out in torch. The "model" is a hash of the text so far, so the right answer is
known; a slot remembers which token was written to it at which position.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from hollow import hollow

SITE, WIDTH, ROUNDS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
REAL = {
    "sglang.srt.mem_cache.allocator",
    "sglang.srt.speculative.dflash_info",
    "sglang.srt.speculative.spec_info",
    "sglang.srt.speculative.ddtree_utils",
}
VOCAB, BLOCK = 12, 6


def anything(*args: object, **_: object) -> object:
    """Stand for a class, a function or a decorator, with or without arguments."""
    return args[0] if args and callable(args[0]) else lambda function=None, *_: function


hollow(SITE, REAL, ("sglang", "triton"), lambda _name: anything)
import sglang.srt.layers.attention.utils as attention_utils  # noqa: E402
import sglang.srt.mem_cache.common as common  # noqa: E402
import sglang.srt.model_executor.forward_batch_info as forward_batch_info  # noqa: E402
import sglang.srt.server_args as server_args  # noqa: E402
import sglang.srt.speculative.spec_utils as spec_utils  # noqa: E402

forward_batch_info.CaptureHiddenMode = SimpleNamespace(FULL=2, NULL=0)
server_args.get_global_server_args = lambda: SimpleNamespace(speculative_algorithm="DDTREE")
common.alloc_token_slots = lambda tree_cache, count: tree_cache.allocator.alloc(count)


def assign(rows, table, start, end, slots, _count) -> None:
    at = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        table[row, first:last] = slots[at : at + last - first].to(table.dtype)
        at += last - first


class CopyIndices:
    """The kernel that lists each request's slots, in torch: `kernel[grid](...)`."""

    def __class_getitem__(cls, _grid: object) -> type:
        return cls

    def __init__(self, table, rows, lengths, starts, _start, out, _width) -> None:
        for row, length, at in zip(rows.tolist(), lengths.tolist(), starts.tolist(), strict=False):
            out[at : at + length] = table[row, :length]


spec_utils.assign_req_to_token_pool_func = assign
attention_utils.create_flashinfer_kv_indices_triton = CopyIndices
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

ddtree_utils = importlib.import_module("sglang.srt.speculative.ddtree_utils")

assert SpeculativeAlgorithm.from_string("ddtree").is_dflash() and SpeculativeAlgorithm.DDTREE.is_ddtree()
assert not SpeculativeAlgorithm.DFLASH.is_ddtree() and not SpeculativeAlgorithm.EAGLE.is_dflash()


class Request:
    """As much of SGLang's request as a verify touches."""

    def __init__(self, prompt: list[int], room: int) -> None:
        self.origin_input_ids, self.output_ids = prompt, []
        self.room, self.done = room, False
        self.spec_verify_ct = self.spec_accepted_drafts = 0
        self.kv_committed_len = self.kv_allocated_len = len(prompt)
        self.sampling_params = SimpleNamespace(sampling_seed=None)
        self.histogram: list[int] = []

    def check_finished(self) -> None:
        self.done = len(self.output_ids) >= self.room or self.output_ids[-1] == 0

    def finished(self) -> bool:
        return self.done

    def update_spec_acceptance_histogram(self, accepted: int) -> None:
        self.histogram.append(accepted)


def oracle(text: tuple[int, ...]) -> int:
    return random.Random(hash(text) & 0xFFFFFF).randrange(VOCAB)


def main() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    size, rows = 4000, 6
    allocator = TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
    table = torch.zeros((rows, 512), dtype=torch.int32)
    written: dict[int, tuple[int, int]] = {}  # slot -> (token, position)
    live: dict[int, Request] = {}
    accepted = 0
    for _ in range(ROUNDS):
        for row in range(rows):
            if row not in live and rng.random() < 0.5:
                prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randrange(1, 20))]
                request = live[row] = Request(prompt, rng.randrange(1, 40))
                slots = allocator.alloc(len(prompt))
                table[row, : len(prompt)] = slots.to(table.dtype)
                written |= {slot: (token, at) for at, (slot, token) in enumerate(zip(slots.tolist(), prompt, strict=True))}
                request.output_ids.append(oracle(tuple(prompt)))
                request.check_finished()
        order = [row for row in live if not live[row].done]
        rng.shuffle(order)
        if order:
            accepted += one_round(rng, order, live, table, allocator, written)
        for row in [row for row in live if live[row].done]:
            request = live.pop(row)
            length = request.kv_committed_len
            assert request.kv_allocated_len == length == len(request.origin_input_ids) + len(request.output_ids) - 1
            allocator.free(table[row, :length].to(torch.int64))
            text = list(request.origin_input_ids)
            for token in request.output_ids:
                assert token == oracle(tuple(text)), "an output is not the target's"
                text.append(token)
        held = sum(r.kv_committed_len for r in live.values())
        assert allocator.available_size() + held == size, "slots leaked or freed twice"
    for row, request in live.items():
        allocator.free(table[row, : request.kv_committed_len].to(torch.int64))
    assert len(set(allocator.free_pages.tolist())) == size
    assert accepted > ROUNDS, "trees were hardly ever right, so nothing was shown"
    print(f"rounds: {ROUNDS}, leaked slots: {size - allocator.available_size()}, accepted: {accepted}")


def one_round(rng, order, live, table, allocator, written) -> int:
    requests = [live[row] for row in order]
    texts = [[*r.origin_input_ids, *r.output_ids] for r in requests]
    seq_lens = torch.tensor([len(text) - 1 for text in texts])
    log_probs = torch.full((len(order), BLOCK - 1, VOCAB), -3.0)
    for i, text in enumerate(texts):
        ahead = list(text)
        for depth in range(BLOCK - 1):
            token = oracle(tuple(ahead))
            log_probs[i, depth, token] = -0.3 if rng.random() < 0.8 else -2.0
            ahead.append(token)
    log_probs = (log_probs + 0.2 * torch.rand_like(log_probs)).log_softmax(dim=2)
    best = torch.topk(log_probs, VOCAB, dim=2)
    roots = torch.tensor([text[-1] for text in texts])
    tree = ddtree_utils.build_tree_batch(best.values, best.indices, WIDTH - 1, root_tokens=roots)
    positions = ddtree_utils.tree_positions(tree.depths, seq_lens)
    plan = ddtree_utils.Plan(tree.tokens, tree.parents, tree.n_valid, positions, BLOCK - 1)

    batch = SimpleNamespace(
        reqs=requests,
        seq_lens=seq_lens.clone(),
        seq_lens_cpu=seq_lens.clone(),
        seq_lens_sum=int(seq_lens.sum()),
        req_pool_indices=torch.tensor(order),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=allocator,
        tree_cache=SimpleNamespace(allocator=allocator),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        sampling_info=None,
        device="cpu",
        batch_size=lambda: len(order),
    )
    verify = ddtree_utils._verify_input(plan, reads_mask=True)
    assert isinstance(verify, DFlashVerifyInput)
    verify.prepare_for_verify(batch, 1)
    n = plan.width
    assert verify.custom_mask.numel() == sum(n * (int(s) + n) for s in seq_lens)
    # What FlashInfer plans with: it packs, per request, queries times keys bits. SGLang pads a short mask with True and says nothing.
    kv_indices, keys, queries, mask = verify.generate_attn_arg_prefill(batch.req_pool_indices, seq_lens, int(seq_lens.sum()), table)
    assert mask is verify.custom_mask and mask.numel() == int((queries.diff() * keys.diff()).sum())
    assert kv_indices.tolist() == [slot for row, s in zip(order, seq_lens.tolist(), strict=True) for slot in table[row, : s + n].tolist()]

    logits = torch.zeros((len(order) * n, VOCAB))
    hidden = torch.arange(len(order) * n, dtype=torch.float32)[:, None]
    start = 0
    for i, row in enumerate(order):
        length = int(seq_lens[i])
        mask = verify.custom_mask[start : start + n * (length + n)].view(n, length + n)
        start += n * (length + n)
        slots = table[row, : length + n].tolist()
        for node in range(n):
            written[slots[length + node]] = (int(plan.tokens[i, node]), int(positions[i, node]))
        for node in range(n):
            # What this node may attend to, in the order of positions: the text it continues.
            seen = sorted((written[slot][1], written[slot][0]) for slot, may in zip(slots, mask[node].tolist(), strict=True) if may)
            if node < int(tree.n_valid[i]):
                assert [at for at, _ in seen] == list(range(len(seen))), "a node sees a position twice or not at all"
                logits[i * n + node, oracle(tuple(token for _, token in seen))] = 1.0
    outcome = verify.verify(batch=batch, logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden), page_size=1)
    last, lengths, kept_hidden, drafts = outcome
    assert last.tolist() == [r.output_ids[-1] for r in requests]
    assert drafts == [int(c) - 1 for c in lengths] and kept_hidden.shape[0] == int(lengths.sum())
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == (seq_lens + lengths).tolist()
    assert batch.seq_lens_sum == int(batch.seq_lens.sum())
    for row, request, length in zip(order, requests, batch.seq_lens.tolist(), strict=True):
        slots = table[row, :length].tolist()
        text = [*request.origin_input_ids, *request.output_ids]
        assert len(set(slots)) == length
        assert [written[slot] for slot in slots] == [(token, at) for at, token in enumerate(text[:length])], "wrong rows kept"
    return sum(drafts)


main()
