"""How much longer does Triton's interpreter take than torch for the attention of a virtual device?

    python -m benchmarks.engine.attention [--rounds 3]

What SGLang's Triton back end computes for models with latent rows or windows: a prompt's chunk after a cached part, and
a step of several requests; both ways in turns, on tensors of the same shapes. Medians of the processor's seconds.

Last result: docs/results/engine.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from prism.engine import boot

HEADS, GROUPS, WIDTH = 4, 2, 64
CASES = {"a chunk of 128 tokens after 128": (128, 128), "a step of 4 requests of 256 tokens": (256, 0)}


def kernels() -> tuple[Callable[..., None], Callable[..., None]]:
    """Both of the back end's, as SGLang has them."""
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    found = extend_attention.extend_attention_fwd, decode_attention.decode_attention_fwd
    return found[0].__wrapped__, found[1].__wrapped__


def ways() -> dict[str, tuple[Callable[..., None], Callable[..., None]]]:
    from sglang_patches import host_attention

    return {"Triton's interpreter": kernels(), "torch": (host_attention.extend, host_attention.decode)}


def computed_s(extend: Callable[..., None], decode: Callable[..., None], before: int, new: int) -> float:
    """Processor seconds of one chunk, or, without new tokens, of one step."""
    import torch

    rows = new or 4
    slots = before if new else before * rows
    q, out = torch.randn(rows, HEADS, WIDTH), torch.empty(rows, HEADS, WIDTH)
    k, v = (torch.randn(slots, GROUPS, WIDTH) for _ in range(2))
    starts, all_slots = torch.arange(0, slots + 1, before, dtype=torch.int32), torch.arange(slots)
    k_new, v_new = (torch.randn(new, GROUPS, WIDTH) for _ in range(2))
    scratch = torch.empty(rows, HEADS, 1, WIDTH), torch.empty(rows, HEADS, 1)
    splits = torch.ones(rows, dtype=torch.int32)
    begun = time.process_time()
    if new:
        more: tuple[Any, ...] = (starts, all_slots, None, True, None, new, 1.0, 1.0)
        extend(q, k_new, v_new, out, k, v, torch.tensor([0, new], dtype=torch.int32), *more)
    else:
        decode(q, k, v, out, starts, all_slots, *scratch, splits, 1, WIDTH**-0.5, 1.0, 1.0)
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention of virtual devices: Triton's interpreter against torch.")
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("importing SGLang ...", file=sys.stderr)
    boot.boot("host")
    warnings.simplefilter("ignore")  # the interpreter's
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for case, (before, new) in CASES.items():
            for way, functions in ways().items():
                found.setdefault((case, way), []).append(computed_s(*functions, before, new))
    print("| of one layer | Triton's interpreter | torch | ratio |\n|---|---|---|---|")
    for case in CASES:
        slow, fast = (statistics.median(found[case, way]) for way in ways())
        print(f"| {case} | {slow * 1e3:.0f} ms | {fast * 1e3:.2f} ms | {slow / fast:.0f} |")


if __name__ == "__main__":
    main()
