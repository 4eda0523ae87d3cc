"""Verify a tree in SGLang: the input of the verify forward, the walk, and the accounting of cache slots."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_overlay.runtime.draw import Draw, choose_tokens
from sglang_overlay.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class Commit:
    """Hold what a round keeps, on the host: per request how many tokens, and flat slot indices `request * n + node`."""

    lengths: list[int]
    last_tokens: list[int]
    keep: list[int]  # in path order, request after request
    free: list[int]  # the rest, ascending


def append_walks(reqs: list[Any], packed: list[list[int]], n: int) -> Commit:
    """Append each request's walk to its output, stopping where the request finishes, and split its slots.

    `packed` rows are path, tokens, length as `Plan.walk` returns them. Node indices on a path ascend.
    """
    lengths, last_tokens, keep, free = [], [], [], []
    for row, (req, walk) in enumerate(zip(reqs, packed, strict=True)):
        steps = (len(walk) - 1) // 2
        count = 0
        for token in walk[steps : steps + walk[-1]]:
            req.output_ids.append(token)
            count += 1
            req.check_finished()
            if req.finished():
                break
        path = walk[:count]
        on_path = set(path)
        first = row * n
        keep += [first + node for node in path]
        free += [first + node for node in range(n) if node not in on_path]
        lengths.append(count)
        last_tokens.append(req.output_ids[-1])
        _count_accepted(req, count - 1)
        req.kv_committed_len += count
        req.kv_allocated_len = req.kv_committed_len
    return Commit(lengths, last_tokens, keep, free)


def _count_accepted(req: Any, accepted: int) -> None:
    """Count for SGLang's statistics, whose names changed after 0.5.11."""
    req.spec_verify_ct += 1
    if hasattr(req, "spec_accepted_drafts"):
        req.spec_accepted_drafts += accepted
        req.update_spec_acceptance_histogram(accepted)
    else:
        req.spec_num_correct_drafts += accepted
        req.update_spec_correct_drafts_histogram(accepted)


def to_device(commit: Commit, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Send a commit in one copy; returns lengths, last tokens, and the slots to keep with those to free behind them, int64."""
    numbers = [*commit.lengths, *commit.last_tokens, *commit.keep, *commit.free]
    flat = torch.tensor(numbers, dtype=torch.int64, pin_memory=torch.device(device).type == "cuda").to(device, non_blocking=True)
    bs = len(commit.lengths)
    return flat[:bs], flat[bs : 2 * bs], flat[2 * bs :]


def draw_of(sampling_info: Any, reqs: list[Any], device: torch.device) -> Draw:
    """Read SGLang's sampling parameters of a batch."""
    seeds = [getattr(req.sampling_params, "sampling_seed", None) for req in reqs]
    given = [-1 if seed is None else seed for seed in seeds]
    return Draw(
        sampling_info.temperatures,
        sampling_info.top_ks,
        sampling_info.top_ps,
        sampling_info.min_ps,
        sampling_info.need_top_p_sampling or sampling_info.need_top_k_sampling or sampling_info.need_min_p_sampling,
        torch.tensor(given, dtype=torch.int64, device=device) if any(seed >= 0 for seed in given) else None,
    )


def target_choices(logits: Tensor, plan: Plan, sampling_info: Any, reqs: list[Any]) -> Tensor:
    """Return the target's token after each node, `[bs, n]`, from its logits `[bs * n, V]`."""
    bs, n = plan.tokens.shape
    if sampling_info is not None and sampling_info.logit_bias is not None:
        bias = torch.zeros((bs, logits.shape[1]), dtype=torch.float32, device=logits.device)
        sampling_info.apply_logits_bias(bias)
        logits = logits + bias.repeat_interleave(n, dim=0)
    if sampling_info is None or sampling_info.is_all_greedy:
        return logits.argmax(dim=-1).view(bs, n)
    return choose_tokens(logits.view(bs, n, -1), plan.positions, draw_of(sampling_info, reqs, logits.device))


@functools.cache
def verify_input_class() -> Any:
    """Return the class of DDTREE's verify input, made at the first call: its base's module imports this file."""
    from sglang.srt.speculative.dflash_info import DFlashVerifyInput
    from sglang.srt.speculative.spec_utils import assign_req_to_token_pool_func

    class DDTreeVerifyInput(DFlashVerifyInput):  # type: ignore[misc]
        """A verify input whose tokens form a tree; set its `plan` before use, and whether attention reads a mask."""

        plan: Plan
        reads_mask: bool

        def prepare_for_verify(self, batch: Any, page_size: int, *, build_custom_mask: bool = True) -> None:  # noqa: ARG002
            """Allocate the slots as DFLASH does, and attend along the tree."""
            super().prepare_for_verify(batch, page_size, build_custom_mask=False)
            if self.reads_mask and not batch.forward_mode.is_idle():
                self.custom_mask = self.plan.mask(batch.seq_lens, int(batch.seq_lens_sum))

        def verify(self, *, batch: Any, logits_output: Any, page_size: int) -> Any:  # noqa: ARG002
            """Walk the tree, append tokens, keep the path's slots and free the others.

            Returns what DFLASH returns: new verified ids, commit lengths, hidden states in path order, accepted counts.
            """
            plan, reqs = self.plan, batch.reqs
            n = plan.width
            chosen = target_choices(logits_output.next_token_logits, plan, batch.sampling_info, reqs)
            commit = append_walks(reqs, plan.walk(chosen).tolist(), n)  # the round's one copy to the host
            lengths, last_tokens, order = to_device(commit, chosen.device)

            kept = len(commit.keep)
            slots = batch.out_cache_loc.index_select(0, order)
            batch.token_to_kv_pool_allocator.free(slots[kept:])
            batch.out_cache_loc = slots[:kept]
            end = batch.seq_lens + lengths
            assign_req_to_token_pool_func(
                batch.req_pool_indices,
                batch.req_to_token_pool.req_to_token,
                batch.seq_lens,
                end,
                batch.out_cache_loc,
                len(reqs),
            )
            batch.seq_lens.copy_(end)
            batch.seq_lens_cpu.add_(torch.tensor(commit.lengths, dtype=batch.seq_lens_cpu.dtype))
            batch.seq_lens_sum += sum(commit.lengths)

            if logits_output.hidden_states is None:
                raise RuntimeError("DDTREE: the verify forward returned no hidden states")
            hidden = logits_output.hidden_states
            kept_hidden = hidden.view(len(reqs) * n, -1).index_select(0, order[:kept])
            logits_output.hidden_states = None
            return last_tokens, lengths.to(torch.int32), kept_hidden, [length - 1 for length in commit.lengths]

    return DDTreeVerifyInput
