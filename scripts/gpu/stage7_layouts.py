"""Stage 7: attention state beyond K and V per token, whose kernels no CPU runs: are the answers those of SGLang by
itself, and does their memory come and go?"""

from __future__ import annotations

import asyncio
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from prism.core.specs import DeviceKind, Speculation, SpeculativeAlgorithm
from prism.engine.errors import CannotActivate
from prism.engine.handle import EngineHandle
from prism.engine.sglang_args import server_arguments
from scripts.gpu.bench_rig import OUTER, Bench, bench, layout_model, model
from scripts.gpu.layouts import WIDE, WINDOW_TOKENS, family, latent_token_bytes
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT, Item, Stage, run_stage
from scripts.gpu.stage5_sharing import prompt
from scripts.gpu.stock_answers import ask_stock
from tests.engine.drafts import make_eagle
from tests.engine.rig import tokenized

TRIED: Final = {"latent": ("triton", "flashinfer", "fa3", "flashmla", "cutlass_mla"), "pages": ("flashinfer", "fa3")}
"""Attention back ends that may or may not read rows strided by a token."""
GUESSES: Final = {
    "ngram": Speculation(SpeculativeAlgorithm.NGRAM, draft_tokens=8, ngrams=1 << 18),
    "eagle": Speculation(SpeculativeAlgorithm.EAGLE, draft_tokens=8, steps=3, branches=4),
}
Args = dict[str, Any]


def sizes(run: Run) -> tuple[list[list[int]], int]:
    """Prompts, and new tokens of each: under Triton's interpreter everything is small."""
    return ([prompt(3, 6), prompt(4, 45)], 8) if run.dry else ([prompt(3, 60), prompt(4, 1500)], 24)


def latent(run: Run) -> None:
    """Latent rows: DeepSeek-V3's attention."""
    asyncio.run(_layout(run, layout_model(run, "latent"), family("latent", tiny=run.dry).engine, alike=True))
    run.needs_gpu()


def windows(run: Run) -> None:
    """Sliding windows beside full attention. Prompts are longer than a window."""
    asyncio.run(_layout(run, layout_model(run, "windows"), family("windows", tiny=run.dry).engine, alike=False))
    run.needs_gpu()


def states(run: Run) -> None:
    """States of linear attention beside KV (Qwen3-Next): Triton's kernels for them run on GPUs only."""
    folder = layout_model(run, "states")
    run.needs_gpu()
    asyncio.run(_layout(run, folder, {}, alike=False))
    asyncio.run(_again_and_again(run, folder, 60))


def families(run: Run) -> None:
    """Llama-4, whose experts no CPU computes, and gpt-oss, whose attention has sinks."""
    run.needs_gpu()
    for name in ("chunks", "sinks"):
        asyncio.run(_layout(run, layout_model(run, name), {}, alike=False))


def eight_bit(run: Run) -> None:
    """8-bit KV."""
    asyncio.run(_layout(run, model(run, "0.6b"), {"kv_cache_dtype": "fp8_e4m3"}, alike=False))
    run.needs_gpu()


def pages(run: Run) -> None:
    """KV pages of several tokens."""
    for page in (16,) if run.dry else (16, 64):
        asyncio.run(_layout(run, model(run, "0.6b"), {"page_size": page}, alike=run.dry))
    run.needs_gpu()


def guesses(run: Run) -> None:
    """Guessed tokens, by n-grams and by a small model (EAGLE) that has seen the answers: they change no answer, and
    come in fewer steps."""
    asyncio.run(_guesses(run, model(run, "0.6b")))
    run.needs_gpu()


def backends(run: Run) -> None:
    """Which attention back ends answer as Triton's does where rows of a token lie apart; a refusal is a finding."""
    run.needs_gpu()
    asyncio.run(_backends(run))


async def _layout(run: Run, folder: Path, engine: Args, *, alike: bool) -> None:
    """Answers against SGLang's own (in a dry run Hugging Face's, if ``alike``, or the engine's first ones), again from
    the image, and while the limit falls."""
    prompts, new = sizes(run)
    expected = None
    if run.dry and alike:
        expected, engine = _reference(run, folder, prompts, new), {**engine, "dtype": "float32"}
    async with bench(run) as at:
        if not run.dry:
            spec = at.rig.spec_at(folder, **engine)
            arguments = {**server_arguments(spec, DeviceKind.CUDA), "mem_fraction_static": 0.4}
            expected = await asyncio.to_thread(ask_stock, run, arguments, prompts, new)
        for turn in ("first", "again"):
            handle, seconds = await at.activate(folder, **engine)
            run.reading(f"{turn}: activation", seconds, "s")
            run.check(turn == "first" or handle.info.from_image, "the second activation read the model's files")
            found = [await at.generate(handle, each, new) for each in prompts]
            _compare(run, turn, found, expected)
            expected = found if expected is None else expected
            if turn == "first":
                await handle.deactivate()
        run.reading("KV of a token", handle.info.kv_bytes_per_token, "B", limit=_token_bytes(run, folder))
        await _under_pressure(run, at, handle)
        await handle.deactivate()
        run.check(not (problems := at.account.audit().problems), f"the account and the driver disagree: {problems}")


def _reference(run: Run, folder: Path, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]] | None:
    command = [sys.executable, "-m", "scripts.gpu.reference", str(folder), "float32"]
    text = json.dumps({"prompts": prompts, "new_tokens": new})
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, env=OUTER, check=False)
    run.check(done.returncode == 0, f"the reference ended with {done.returncode}: {done.stderr[-300:]}")
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def _compare(run: Run, turn: str, found: list[list[int]], expected: list[list[int]] | None) -> None:
    if expected is None:
        return
    same = [
        next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        for x, y in zip(found, expected, strict=True)
    ]
    run.check(min(same) > 0, f"{turn}: a first token differs: {found} against {expected}")
    new = len(found[0])
    run.reading(f"{turn}: tokens that agree", statistics.mean(same), f"of {new}", goal=new, less_is_better=False)


def _token_bytes(run: Run, folder: Path) -> float | None:
    """What a token must take, where that is known: the latent model's."""
    return latent_token_bytes(WIDE["num_hidden_layers"]) if not run.dry and "latent" in folder.name else None


async def _under_pressure(run: Run, at: Bench, handle: EngineHandle) -> None:
    """Requests run while the limit falls to the least an engine can have: all end, with as many tokens as asked for."""
    count, length, new = (3, 20, 12) if run.dry else (12, WINDOW_TOKENS + 500, 200)
    rids = [at.rig.submit(handle, tokenized("", prompt(30 + i, length), new)) for i in range(count)]
    await at.rig.wait_tokens(rids[0], 2)
    owners = {owner.pid: owner.kv_bytes for owner in at.account.stats().owners}
    run.reading("KV while they run", sum(owners.values()) / 2**20, "MiB")
    handle.set_kv_limit(64 << 20)
    answers = [await at.rig.answer(rid, timeout_s=120.0) for rid in rids]
    run.check(all(len(answer) == new for answer in answers), f"{[len(a) for a in answers]} tokens, not {new} each")
    run.remark(f"{0 if handle.load is None else handle.load.retractions} retractions under the lowered limit")


async def _again_and_again(run: Run, folder: Path, rounds: int) -> None:
    """The same answer after many activations."""
    async with bench(run) as at:
        answers = set[tuple[int, ...]]()
        for _ in range(rounds):
            handle, _ = await at.activate(folder)
            answers.add(tuple(await at.generate(handle, prompt(3), 8)))
            await handle.deactivate()
        run.check(len(answers) == 1, f"{len(answers)} different answers in {rounds} activations")


async def _guesses(run: Run, folder: Path) -> None:
    prompts, new = sizes(run)
    async with bench(run) as at:
        plain, _ = await at.activate(folder)
        expected = [await at.generate(plain, each, new) for each in prompts]
        await plain.deactivate()
        texts = [(*each, *answer) for each, answer in zip(prompts, expected, strict=True)]
        draft = run.scratch / f"draft-{folder.name}"
        if not draft.exists():
            make_eagle(folder, draft, texts, new)
        for name, how in {**GUESSES, "eagle": replace(GUESSES["eagle"], draft=str(draft))}.items():
            handle = await at.rig.activate(replace(at.rig.spec_at(folder), speculation=how), at.rig.devices[:1])
            for turn in ("first", "again"):  # n-grams guess what the engine has said
                found = [await at.generate(handle, each, new) for each in prompts]
                _compare(run, f"{name}, {turn}", found, expected)
            rid = at.rig.submit(handle, tokenized("", prompts[0], new))
            await at.rig.answer(rid)
            steps = len([item for item in at.rig.items[rid] if item.token_ids])
            run.reading(f"{name}: steps", steps, f"of {new}", goal=new * 2 / 3)
            run.reading(f"{name}: KV of a token", handle.info.kv_bytes_per_token, "B")
            await _under_pressure(run, at, handle)
            await handle.deactivate()
        run.check(not (problems := at.account.audit().problems), f"the account and the driver disagree: {problems}")


async def _backends(run: Run) -> None:
    async with bench(run) as at:
        folders = {"latent": layout_model(run, "latent"), "pages": model(run, "0.6b")}
        for name, backends in TRIED.items():
            args: Args = {"page_size": 64} if name == "pages" else {}
            ask = functools.partial(_first_answer, at, folders[name], args)
            expected = await ask("triton")
            for backend in backends:
                try:
                    same = await ask(backend) == expected
                    run.remark(f"{name}, {backend}: {'the same answer as triton' if same else 'ANOTHER answer'}")
                except CannotActivate as refused:
                    run.remark(f"{name}, {backend}: {refused.cause}: {refused}"[:300])


async def _first_answer(at: Bench, folder: Path, args: Args, backend: str) -> list[int]:
    handle, _ = await at.activate(folder, **args, attention_backend=backend)
    found = await at.generate(handle, prompt(3), 8)
    await handle.deactivate()
    return found


STAGE = Stage(
    "scripts.gpu.stage7_layouts",
    __doc__,
    (
        Item("latent", latent, 150),
        Item("windows", windows, 150),
        Item("states", states, 180),
        Item("families", families, 240),
        Item("eight_bit", eight_bit, 120),
        Item("pages", pages, 180),
        Item("guesses", guesses, 240),
        Item("backends", backends, 240),
    ),
)

if __name__ == "__main__":
    sys.exit(run_stage(STAGE))
