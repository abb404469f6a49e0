"""How fast is memory mapped, and what does a decode step pay for reading K and V where pages come and go?

    python -m benchmarks.memory.mapped [--device cuda:0]

Mapped bytes/s: a weight region committed with new pages and with spare ones. Decode step: for 64 sequences of 512
tokens, scores and outputs of attention over one layer's K and V, gathered by slot as a paged kernel does, in a pool's
strided views and in plain torch tensors of the same rows; the two take turns, and the ratio is what elasticity costs.
Goal on a GPU: less than 1% over plain tensors. A virtual device (the default, host:0) shows the same code at work.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

from benchmarks.memory.bench import GIB, LLAMA_8B, MIB, report
from prism import memory

SEQUENCES, TOKENS, ROUNDS = 64, 512, 9
REGION_BYTES = GIB // 2


def timed_s(action: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done it."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    sync()
    start = time.perf_counter()
    action()
    sync()
    return time.perf_counter() - start


def mapping(owner: memory.Owner, device: torch.device) -> None:
    """Commits and decommits; the owner's lease keeps the pages as spares the second time."""
    fresh, pooled = [], []
    for _ in range(ROUNDS):
        region = owner.weight_region(REGION_BYTES)
        fresh.append(timed_s(region.commit, device))
        tokens = REGION_BYTES // LLAMA_8B.cell_bytes
        idle = owner.arena(2 * REGION_BYTES).divide(
            LLAMA_8B, tokens, REGION_BYTES
        )  # its unused lease covers the spares
        region.decommit()
        pooled.append(timed_s(region.commit, device))
        idle.close()
        region.close()
    for what, times in (("new pages", fresh), ("spare pages", pooled)):
        report(f"mapped bytes/s, {what}", REGION_BYTES / statistics.median(times) / GIB, "GiB/s")


def attend(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """One token per sequence: k, v [rows, heads, dim]; slots [sequences, tokens]; query [sequences, heads, dim]."""
    scores = torch.einsum("shd,sthd->sht", query, k[slots]).softmax(-1)
    return torch.einsum("sht,sthd->shd", scores, v[slots])


def decode(owner: memory.Owner, device: torch.device) -> None:
    """The same rows in a pool and in tensors of torch's own, contents alike."""
    pool = owner.arena(16 * GIB).divide(LLAMA_8B, 2 * SEQUENCES * TOKENS, (SEQUENCES * TOKENS // 16 + 65) * 2 * MIB)
    slots = torch.from_numpy(pool.alloc(SEQUENCES * TOKENS)).to(device)
    views_k, views_v = memory.torch_views(pool, torch.bfloat16)
    rows = (SEQUENCES * TOKENS + 1, LLAMA_8B.kv_heads, LLAMA_8B.head_dim)
    plain_k, plain_v = (
        torch.randn(rows, dtype=torch.bfloat16, device=device),
        torch.randn(rows, dtype=torch.bfloat16, device=device),
    )
    order = torch.arange(1, SEQUENCES * TOKENS + 1, device=device)
    views_k[5][slots], views_v[5][slots] = plain_k[order], plain_v[order]
    query = torch.randn((SEQUENCES, *rows[1:]), dtype=torch.bfloat16, device=device)
    table, plain_table = slots.view(SEQUENCES, TOKENS), order.view(SEQUENCES, TOKENS)
    assert torch.equal(attend(views_k[5], views_v[5], table, query), attend(plain_k, plain_v, plain_table, query))
    ratios = []
    for _ in range(ROUNDS):
        plain_s = timed_s(lambda: attend(plain_k, plain_v, plain_table, query), device)
        pool_s = timed_s(lambda: attend(views_k[5], views_v[5], table, query), device)
        ratios.append(pool_s / plain_s)
    report("decode attention, pool over plain torch", statistics.median(ratios), "x", "goal on a GPU < 1.01")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host:0", help="host:N or cuda:N")
    name = parser.parse_args().device
    device = torch.device(name if name.startswith("cuda") else "cpu")
    with (
        tempfile.TemporaryDirectory() as directory,
        memory.open_device(name, 12 * GIB, account_dir=directory).register("bench") as owner,
    ):
        mapping(owner, device)
        decode(owner, device)


if __name__ == "__main__":
    main()
