"""What does an engine cost that does nothing?

    python -m benchmarks.memory.idle

Bytes of device memory and of books of an idle pool, for several models and for 100,000 and 1,000,000 tokens of range.

Last result: docs/results/memory.md.
"""

from __future__ import annotations

from benchmarks.memory.bench import GIB, LLAMA_8B, temporary_device
from prism import memory

MODELS = {
    "Llama-8B": LLAMA_8B,
    "Qwen2.5-7B": memory.KvLayout(layers=28, kv_heads=4, head_dim=128),
    "DeepSeek-V3 (latent rows)": memory.KvLayout(layers=61, kv_heads=1, head_dim=576, v_head_dim=0),
}


def main() -> None:
    with temporary_device(2 * GIB) as device, device.register("bench") as owner:
        for name, layout in MODELS.items():
            for tokens in (100_000, 1_000_000):
                pool = owner.arena(2 * tokens * layout.cell_bytes).divide(layout, tokens)
                stats = pool.stats()
                mib, kib = owner.leased_bytes / (1 << 20), stats["books_bytes"] / 1024
                print(f"{name:<28} {tokens:>9} tokens: {mib:.0f} MiB of the device, {kib:,.0f} KiB of books")
                pool.close()
        print(f"account of the device: {device.account_path.stat().st_size / 1024:.0f} KiB, shared by all")


if __name__ == "__main__":
    main()
