"""One rank of the all-reduce check: `RANK RANKS BACKEND STORE`. Runs under the venv's interpreter; imports torch."""

from __future__ import annotations

import sys
from datetime import timedelta


def main(argv: list[str]) -> int:
    """Add ones over all ranks and compare the sum; exit status 0 when it is right."""
    import torch
    import torch.distributed as dist

    rank, ranks, backend, store = int(argv[0]), int(argv[1]), argv[2], argv[3]
    device = "cuda:%d" % rank if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
    for size in (1, 1 << 20):
        values = torch.ones(size, device=device)
        dist.all_reduce(values)
        if not bool((values == ranks).all()):
            print("the sum over %d ranks is wrong: %r" % (ranks, values[:4].tolist()))
            return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
