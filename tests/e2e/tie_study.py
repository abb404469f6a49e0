"""How often may rounding decide a greedy token? For greedy answers with penalties: how far the two best tokens are
apart, and how much the log-probabilities of the same tokens differ between an idle server and one with neighbours in
the batch.

    python -m tests.e2e.tie_study [--prompts 24] [--tokens 120] [--model demo-qwen3]

On two cores, demo-qwen3: of 2,880 tokens the two best are closer than 1e-2 in 64 cases, 1e-3 in 9, 1e-4 in one; the
same tokens' log-probabilities differ by up to 4e-6 between two runs alone (the second finds its prefix in the cache)
and 1.3e-5 with neighbours. So one token in some 100,000 may go either way: once in some hundred answers.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import openai

from .server import REPO, Server, catalog, prompts, start

PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4}


async def answer(client: openai.AsyncOpenAI, model: str, prompt: str, tokens: int, **more: float) -> Any:
    fixed = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 5}
    body = {**fixed, **PENALTIES, **more}
    reply = await client.completions.create(**body, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    return reply.choices[0].logprobs


async def study(server: Server, model: str, count: int, tokens: int) -> None:
    asked = [f"{prompt} {i}" for i, prompt in enumerate(prompts(count))]
    async with server.async_client() as client:
        alone = [await answer(client, model, prompt, tokens) for prompt in asked]
        again = [await answer(client, model, prompt, tokens) for prompt in asked]
        beside = await asyncio.gather(*(answer(client, model, prompt, tokens) for prompt in asked))
    gaps = sorted(gap for one in alone for gap in _gaps(one))
    print(f"{len(gaps)} tokens; the two best are apart by less than:")
    for bound in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        print(f"  {bound:g}: {sum(gap < bound for gap in gaps)}")
    for name, other in (("alone again", again), ("with neighbours", beside)):
        noise = [d for a, b in zip(alone, other, strict=True) for d in _differences(a, b)]
        parted = [_parting(a, b) for a, b in zip(alone, other, strict=True) if a.tokens != b.tokens]
        print(f"{name}: log-probabilities differ by up to {max(noise, default=0.0):.1e}; answers that part: {parted}")


def _gaps(logprobs: Any) -> list[float]:
    ranked = [sorted(top.values(), reverse=True) for top in logprobs.top_logprobs if top and len(top) > 1]
    return [values[0] - values[1] for values in ranked]


def _differences(a: Any, b: Any) -> list[float]:
    """Of the chosen tokens' log-probabilities, as long as the answers are the same."""
    found = []
    for token, other, x, y in zip(a.tokens, b.tokens, a.token_logprobs, b.token_logprobs, strict=True):
        if token != other:
            break
        found.append(abs(x - y))
    return found


def _parting(a: Any, b: Any) -> str:
    at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
    return f"after {at} tokens, the two best {_gaps(a)[at]:.1e} apart"


def main() -> None:
    parser = argparse.ArgumentParser(description="How often may rounding decide a greedy token?")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--model", default="demo-qwen3")
    options = parser.parse_args()
    models = REPO / "demo-models"
    if not (models / ".complete").exists():
        subprocess.run([sys.executable, "scripts/make_demo_models.py", str(models)], cwd=REPO, check=True)
    with tempfile.TemporaryDirectory(prefix="prism-ties-") as folder:
        server = start(Path(folder), catalog(models))
        try:
            asyncio.run(study(server, options.model, options.prompts, options.tokens))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
