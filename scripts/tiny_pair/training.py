"""What the steps of `train_tiny.py` share: the device, the clock, and the loop that optimises until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

START = time.time()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKING = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def log(*words: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def autocast() -> torch.autocast:
    """Return the context of a forward pass: bf16 on a GPU, fp32 on a CPU."""
    return torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=DEVICE == "cuda")


def run_for(
    seconds: float,
    module: nn.Module,
    peak: float,
    loss_of: Callable[[int], Tensor],
    what: str,
    report: Callable[[], str],
    every: int,
) -> None:
    """Optimise until the time is up: AdamW, short warm-up, then the rate falls linearly to nothing."""
    matrices = [p for p in module.parameters() if p.dim() == 2]
    others = [p for p in module.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    begin, step = time.time(), 0
    while (done := (time.time() - begin) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1, (step + 1) / 200) * (1 - done) + 1e-6
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step <= 3:  # compiling is not training
            begin = time.time()
        if step % min(every, 500) == 0 or step == 1:
            log(what, "step", step, "loss", round(loss.item(), 3), report() if step % every == 0 else "")
    log(what, "done after", step, "steps:", report())
