"""Play rounds of the 0.5.23 adapter on SGLang's own worker, verify input and draft state, on the CPU.

Run with a stock site: `v2_rounds.py SITE WIDTH ROUNDS`. Real are `dflash_worker_v2.py`, whose drafting runs unchanged until our
exception, `dflash_info.py`, `dflash_info_v2.py`, `spec_info.py` and `spec_registry.py`; what those import and never reach
here is left empty. The "model" is a hash of the text so far, so the right answer is known; a slot remembers which token was
written to it at which position, for the target and for the drafter.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import random
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch
from hollow import hollow

SITE, WIDTH, ROUNDS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SPECULATIVE = "sglang.srt.speculative."
REAL = {SPECULATIVE + name for name in ("dflash_worker_v2", "dflash_info", "dflash_info_v2", "spec_info", "spec_registry")}
VOCAB, BLOCK, ROWS = 12, 6, 6


class AnyMember(type):
    """Give a class any member."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=AnyMember):
    """Stand for a class, a function or a decorator that is imported and not reached."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __class_getitem__(cls, _item: object) -> type:
        return cls


def member(name: str) -> object:
    """Stand for a name of an empty module: a question is answered with no."""
    return (lambda *_, **__: False) if name.startswith("is_") else Anything


class Bag(SimpleNamespace):
    """A configuration namespace whose leaves can be set for a while."""

    @contextlib.contextmanager
    def override(self, **leaves: object):
        before = {name: getattr(self, name) for name in leaves}
        vars(self).update(leaves)
        yield self
        vars(self).update(before)


class Fields:
    """A record that holds whatever it is made with."""

    def __init__(self, **fields: object) -> None:
        vars(self).update(fields)

    @classmethod
    def init_new(cls, batch: object, _runner: object, **fields: object) -> Fields:
        return cls(batch=batch, spec_info=batch.spec_info, bound=batch.seq_lens_cpu, **fields)


class Worker:
    """As much of `BaseSpecWorker` as a round touches."""

    target_worker = property(lambda self: self._target_worker)


def part(name: str) -> types.ModuleType:
    return importlib.import_module("sglang." + name)


hollow(SITE, REAL, ("sglang",), member)
SPEC = Bag(speculative_algorithm="DDTREE", speculative_num_draft_tokens=WIDTH, speculative_dflash_block_size=BLOCK)
context = part("srt.runtime_context")
context.get_spec = lambda: SPEC
context.get_schedule = lambda: Bag(max_running_requests=2)
context.get_parallel = lambda: Bag(attn_dp_enabled=False)
modes = part("srt.model_executor.forward_batch_info")
modes.CaptureHiddenMode = enum.Enum("CaptureHiddenMode", "NULL FULL")
modes.ForwardMode = enum.Enum("ForwardMode", "IDLE TARGET_VERIFY")
modes.ForwardMode.is_idle = modes.ForwardMode.is_extend = lambda self: False
modes.ForwardBatch = Fields
modes.enable_num_token_non_padded = lambda: False
part("srt.managers.utils").GenerationBatchResult = Fields
part("srt.managers.scheduler").GenerationBatchResult = Fields
part("srt.speculative.base_spec_worker").BaseSpecWorker = Worker
part("srt.lora.layers").unwrap_lora_layer = lambda layer: layer
part("srt.speculative.spec_tp_sync").SpecTpSyncSite = Bag(DFLASH_ACCEPT_GREEDY=1, DFLASH_ACCEPT_SAMPLE=2)
utils = part("srt.speculative.spec_utils")
utils.draft_tp_context = lambda _layout: contextlib.nullcontext()
utils.prepare_mamba_track_for_verify = lambda _batch: None


def gather_window(*, req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device):
    assert torch.equal(end_offset, start_offset + draft_token_num) and batch_size == len(start_offset)
    columns = start_offset[:, None] + torch.arange(draft_token_num)
    return req_to_token[req_pool_indices[:, None], columns].to(torch.int64).reshape(-1)


part("kernels.ops.speculative.cache_locs").assign_extend_cache_locs_func = gather_window
common = part("srt.speculative.draft_worker_common")
info_v2 = importlib.import_module(SPECULATIVE + "dflash_info_v2")


def next_draft_input(*, bonus_tokens, new_seq_lens):
    none = torch.empty((len(new_seq_lens), 0))
    return info_v2.DFlashDraftInputV2(none, none, bonus_tokens, new_seq_lens, none)


common.make_draft_input_v2 = next_draft_input
torch.Tensor.record_stream = lambda *_: None  # has no CPU form

from sglang.srt.speculative.dflash_info import DFlashVerifyInput  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

from sglang_overlay.adapters import v2, v2_worker  # noqa: E402
from sglang_overlay.runtime.plan import Head  # noqa: E402

wrapped = DFlashVerifyInput.__post_init__
DFlashVerifyInput.__post_init__ = lambda self: v2.with_capture_mask(lambda verify: wrapped(verify), self)


def oracle(text: tuple[int, ...]) -> int:
    return random.Random(hash(text) & 0xFFFFFF).randrange(VOCAB)


class Plans:
    """SGLang's index translator where ids are slots already."""

    def plan(self, *, req_pool_indices, seq_lens, seq_lens_cpu, write_virtual, read_extent):
        assert write_virtual.numel() == len(seq_lens) * read_extent
        return SimpleNamespace(write_ids=lambda _translator: write_virtual, bind=lambda *_: None)


class Target:
    """The target: what a node sees through the mask, in the order of positions, is the text that it continues."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.written: dict[int, tuple[int, int]] = {}
        self.model_runner = SimpleNamespace(
            model=SimpleNamespace(get_input_embeddings=lambda: None, lm_head=SimpleNamespace(weight=torch.eye(VOCAB))),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            kv_index_translator=Plans(),
            decode_cuda_graph_runner=None,
            attn_backend=SimpleNamespace(init_forward_metadata=lambda _batch: None),
        )

    def forward_batch_generation(self, *, batch, forward_batch, is_verify, skip_attn_backend_init):
        assert batch is None and is_verify and skip_attn_backend_init
        batch, verify = forward_batch.batch, forward_batch.spec_info
        n, bs = verify.draft_token_num, len(batch.seq_lens)
        assert verify.custom_mask.numel() == sum(n * (int(s) + n) for s in batch.seq_lens)
        assert forward_batch.bound.tolist() == [int(s) + n for s in batch.seq_lens], "the host's bound is not the verify forward's"
        tokens, positions = verify.draft_token.view(bs, n), verify.positions.view(bs, n)
        logits, hidden, start = torch.zeros((bs * n, VOCAB)), torch.zeros((bs * n, 2)), 0
        window = batch.out_cache_loc.view(bs, n)
        for i, row in enumerate(batch.req_pool_indices.tolist()):
            length = int(batch.seq_lens[i])
            mask = verify.custom_mask[start : start + n * (length + n)].view(n, length + n)
            start += n * (length + n)
            slots = self.table[row, : length + n].tolist()
            assert slots[length:] == window[i].tolist()
            for node, slot in enumerate(slots[length:]):
                self.written[slot] = int(tokens[i, node]), int(positions[i, node])
            hidden[i * n : (i + 1) * n] = torch.stack((tokens[i], positions[i]), dim=1).float()
            for node in range(n):
                seen = sorted(self.written[slot][::-1] for slot, may in zip(slots, mask[node].tolist(), strict=True) if may)
                if [at for at, _ in seen] == list(range(len(seen))):  # padding nodes see their root, and themselves twice as deep
                    logits[i * n + node, oracle(tuple(token for _, token in seen))] = 1.0
        out = SimpleNamespace(next_token_logits=logits, hidden_states=hidden)
        return SimpleNamespace(logits_output=out, can_run_cuda_graph=False, routed_experts_output=None, indexer_topk_output=None)


def make_worker(target: Target, rng: random.Random, texts: dict[int, list[int]]) -> object:
    """Return our worker without SGLang's construction, which needs weights and a device."""
    drafted: dict[int, tuple[int, int]] = {}

    class Played(v2_worker.worker_class()):
        def __init__(self) -> None:
            pass

        def _append_target_hidden_to_draft_kv_by_loc(self, *, target_hidden, cache_loc, cache_loc_2d, positions, commit_lens):
            steps = cache_loc_2d.shape[1]
            assert torch.equal(cache_loc_2d.reshape(-1), cache_loc) and len(target_hidden) == len(positions) == len(cache_loc)
            for i, count in enumerate(commit_lens.tolist()):
                for at in range(i * steps, i * steps + count):
                    token, position = target_hidden[at].int().tolist()
                    assert position == int(positions[at]), "a hidden state goes where another position's belongs"
                    drafted[int(cache_loc[at])] = token, position

    def draft(forward_batch: Fields) -> SimpleNamespace:
        assert forward_batch.input_ids.numel() == forward_batch.batch_size * BLOCK
        hidden = torch.full((forward_batch.batch_size, BLOCK, VOCAB), -3.0)
        for i, row in enumerate(forward_batch.req_pool_indices.tolist()):
            ahead = list(texts[row])
            assert int(forward_batch.input_ids.view(-1, BLOCK)[i, 0]) == ahead[-1], "the block is not anchored on the last token"
            for depth in range(1, BLOCK):
                token = oracle(tuple(ahead))
                hidden[i, depth, token] = -0.3 if rng.random() < 0.8 else -2.0
                ahead.append(token)
        hidden += 0.2 * torch.rand_like(hidden)
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden.view(-1, VOCAB)), can_run_graph=False)

    worker = Played()
    vars(worker).update(
        _target_worker=target, model_runner=target.model_runner, device="cpu", block_size=BLOCK, tree_width=WIDTH, tree_topk=8,
        tree_head=Head(torch.eye(VOCAB), 0, None), draft_model=SimpleNamespace(), draft_parallel_layout=None, selector=None, lilicorr=None,
        draft_model_runner=SimpleNamespace(forward=draft, kv_index_translator=Plans()), _is_domino=False, _draft_sampler=None,
        _draft_block_ids_buf=None, _full_embed_gpu=torch.zeros((VOCAB + 1, 4)), _noise_embed_scale=1.0, _mask_token_id=VOCAB,
        _use_triton_prepare_block=False, use_compact_draft_cache=False, _block_pos_offsets=torch.arange(BLOCK), _draft_block_spec_info=None,
        _target_logits_processor=None, _tp_sync=SimpleNamespace(sync=lambda _site, _value: None), drafted=drafted,
    )  # fmt: skip
    return worker


def main() -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    table = torch.randperm(ROWS * 1024).view(ROWS, 1024).to(torch.int32)
    slots_of = {row: set(table[row].tolist()) for row in range(ROWS)}
    target = Target(table)
    texts = {row: [rng.randrange(VOCAB) for _ in range(rng.randrange(2, 20))] for row in range(ROWS)}
    worker = make_worker(target, rng, texts)
    for row, text in texts.items():
        for at, token in enumerate(text[:-1]):
            target.written[int(table[row, at])] = worker.drafted[int(table[row, at])] = token, at
    accepted = 0
    for _ in range(ROUNDS):
        order = rng.sample(range(ROWS), rng.randrange(1, ROWS + 1))
        seq_lens = torch.tensor([len(texts[row]) - 1 for row in order])
        published: list[torch.Tensor] = []
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False), is_extend_in_batch=False,
            spec_info=next_draft_input(bonus_tokens=torch.tensor([texts[row][-1] for row in order]), new_seq_lens=seq_lens),
            seq_lens=seq_lens, seq_lens_cpu=seq_lens.clone(), seq_lens_sum=int(seq_lens.sum()), req_pool_indices=torch.tensor(order),
            sampling_info=None, reqs=order, has_grammar=False, return_logprob=False, can_run_decode_cuda_graph=False, out_cache_loc=None,
        )  # fmt: skip
        result = worker.forward_batch_generation(batch, published.append)
        assert batch.seq_lens_cpu.tolist() == seq_lens.tolist(), "the host's lengths were not put back"
        tokens, counts = result.next_token_ids.view(len(order), WIDTH).tolist(), result.accept_lens.tolist()
        assert result.speculative_num_draft_tokens == WIDTH and result.accept_lens.dtype == torch.int32
        assert torch.equal(published[0], result.new_seq_lens) and torch.equal(result.next_draft_input.new_seq_lens, result.new_seq_lens)
        for i, row in enumerate(order):
            for token in tokens[i][: counts[i]]:
                assert token == oracle(tuple(texts[row])), "an output is not the target's"
                texts[row].append(token)
            assert int(result.next_draft_input.bonus_tokens[i]) == texts[row][-1]
            length = len(texts[row]) - 1
            assert int(result.new_seq_lens[i]) == length
            kept = table[row, :length].tolist()
            want = [(token, at) for at, token in enumerate(texts[row][:length])]
            assert [target.written[slot] for slot in kept] == want, "wrong rows kept for the target"
            assert [worker.drafted[slot] for slot in kept] == want, "wrong rows kept for the drafter"
            assert set(table[row].tolist()) == slots_of[row], "a slot was lost or doubled"
            accepted += counts[i] - 1
    assert accepted > ROUNDS, "trees were hardly ever right, so nothing was shown"
    algorithm = v2.algorithm_class()("DDTREE", None)
    assert algorithm.is_dflash_family() and not algorithm.is_uno() and not algorithm.carries_draft_hidden_states()
    assert not algorithm.need_topk() and algorithm.get_platform_worker_cls() is None
    widths = [algorithm.get_num_tokens_per_req_for_target_verify(WIDTH, drafter) for drafter in (False, True)]
    assert widths == [WIDTH, BLOCK]
    asked = {name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_"))}
    assert asked and all(hasattr(algorithm, name) for name in asked)
    full, null = modes.CaptureHiddenMode.FULL, modes.CaptureHiddenMode.NULL
    placeholder = DFlashVerifyInput(None, None, WIDTH, capture_hidden_mode=full)
    assert placeholder.custom_mask.numel() == 2 * WIDTH * (WIDTH + 1) and bool(placeholder.custom_mask.all())
    assert DFlashVerifyInput(None, None, BLOCK, capture_hidden_mode=null).custom_mask is None
    SPEC.speculative_algorithm = "DFLASH"
    assert DFlashVerifyInput(None, None, WIDTH, capture_hidden_mode=full).custom_mask is None
    print(f"rounds: {ROUNDS}, width: {WIDTH}, accepted: {accepted}")


main()
