"""SGLang as it comes, under the same load.

``python -m scripts.gpu.stock FOLDER`` reads a :class:`scripts.gpu.load.Load` as JSON and prints the outcome.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from scripts.gpu.load import Load, OnFirst, measure


async def run(engine: Any, load: Load) -> None:
    async def answer(prompt: Sequence[int], new_tokens: int, on_first: OnFirst) -> int:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        chunks = await engine.async_generate(input_ids=list(prompt), sampling_params=sampling, stream=True)
        count = 0
        async for chunk in chunks:
            if count == 0:
                on_first()
            count = chunk["meta_info"]["completion_tokens"]
        return count

    print(msgspec.json.encode(await measure(load, answer)).decode(), flush=True)


def main() -> None:
    import sglang

    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    engine = sglang.Engine(model_path=sys.argv[1], mem_fraction_static=0.8, log_level="warning")
    try:
        asyncio.get_event_loop().run_until_complete(run(engine, load))
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
