"""A resumed request goes on as if it had never stopped, also with everything that depends on the tokens so far."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.rig import Rig, prompt, tokenized

pytestmark = pytest.mark.engine
NEW = 30

CASES: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "seeded": {"temperature": 1.0, "sampling_seed": 7, "top_p": 0.9, "top_k": 50},
    "unseeded": {"temperature": 1.0},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "regex": {"regex": "[a-z ]{40,60}", "ignore_eos": False},
    "schema": {"json_schema": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'},
    "logit-bias": {"logit_bias": {"77": 5.0}},
}


async def test_every_kind_of_sampling_goes_on_exactly(rig: Rig) -> None:
    async with rig.engine("demo-qwen3") as handle:
        for case, sampling in CASES.items():
            rid = rig.submit(handle, tokenized(f"case-{case}", prompt(3), NEW, **sampling))
            whole, finish = await rig.answer(rid), rig.finish[rid]
            assert whole, case
            half = whole[: len(whole) // 2]
            again = tokenized(rid, prompt(3), NEW, **sampling)
            assert await rig.ask(handle, again, attempt=1, resumed=half) == whole, case
            assert rig.finish[rid] == finish, case


async def test_log_probabilities_continue(rig: Rig) -> None:
    sglang_codec = __import__("prism.engine.sglang_codec", fromlist=["_extra_decoder"])
    async with rig.engine("demo-llama") as handle:
        rid = rig.submit(handle, tokenized("logprobs", prompt(3), 10, logprobs=True))
        whole = await rig.answer(rid)
        extras = [sglang_codec._extra_decoder.decode(item.extra) for item in rig.items.pop(rid)]
        assert len(extras[0].input_val) == 30
        values = [v for extra in extras for v in extra.output_val]
        assert [i for extra in extras for i in extra.output_idx] == whole
        again = tokenized(rid, prompt(3), 10, logprobs=True)
        assert await rig.ask(handle, again, attempt=1, resumed=whole[:4]) == whole
        resumed = [sglang_codec._extra_decoder.decode(item.extra) for item in rig.items[rid]]
        assert resumed[0].input_val is None, "the prompt's were delivered by the first attempt"
        assert [v for extra in resumed for v in extra.output_val] == pytest.approx(values[4:], abs=1e-4)


async def test_minimum_tokens_count_earlier_attempts(rig: Rig) -> None:
    """End-of-sequence is pushed up so that it comes as soon as it may."""
    sampling = {"min_new_tokens": 12, "ignore_eos": False, "logit_bias": {"1": 100.0}}
    async with rig.engine("demo-llama") as handle:
        whole = await rig.ask(handle, tokenized("minimum", prompt(3), NEW, **sampling))
        assert len(whole) == 13
        assert whole[-1] == 1
        again = await rig.ask(handle, tokenized("minimum", prompt(3), NEW, **sampling), attempt=1, resumed=whole[:6])
        assert again == whole


async def test_stop_token_across_attempts(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        free = await rig.ask(handle, tokenized("stopfree", prompt(3), NEW))
        stop = {"stop_token_ids": [free[20]], "ignore_eos": False}
        whole = await rig.ask(handle, tokenized("stop", prompt(3), NEW, **stop))
        assert whole == free[: free.index(free[20]) + 1]
        finish = rig.finish["stop"]
        assert await rig.ask(handle, tokenized("stop", prompt(3), NEW, **stop), attempt=1, resumed=whole[:5]) == whole
        assert rig.finish["stop"] == finish == {"type": "stop", "matched": free[20]}
        complete = tokenized("stop", prompt(3), NEW, **stop)
        assert await rig.ask(handle, complete, attempt=2, resumed=whole) == whole, "nothing is added to a whole answer"
        assert rig.finish["stop"] == finish
        assert rig.items["stop"][-1].token_ids == []


async def test_complete_answers_end_at_once(rig: Rig) -> None:
    async with rig.engine("demo-llama") as handle:
        whole = await rig.ask(handle, tokenized("full", prompt(3), 8))
        assert await rig.ask(handle, tokenized("full", prompt(3), 8), attempt=1, resumed=whole) == whole
        assert rig.finish["full"] == {"type": "length", "length": 8}
        assert rig.items["full"][-1].token_ids == []
