"""One rank of a gloo broadcast, for :mod:`benchmarks.weights.multicast_hosts`: ``rank world ip_of_rank_0 bytes reps``.

Rank 0 prints, per repetition, the seconds until the last rank had everything (their clocks are the same)."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist


def main() -> None:
    rank, world, nbytes, reps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{sys.argv[3]}:29555", rank=rank, world_size=world)
    data = torch.full((nbytes,), rank, dtype=torch.uint8)
    for _ in range(reps):
        dist.barrier()
        start_s = time.monotonic()
        dist.broadcast(data, 0)
        took = torch.tensor([time.monotonic() - start_s], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(float(took), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
