"""An engine whose requests take turns: all of them go on although their KV does not fit, and every token is right."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prism.core.specs import Scheduling
from prism.kv.host_pool import HostPool
from prism.kv.pool_directory import drop_host_pool, host_pool_directory
from prism.kv.settings import KvSettings, write_kv_settings
from tests.engine.rig import DEVICE_BYTES, Rig, prompt, reference, tokenized
from tests.patience import happens

pytestmark = pytest.mark.engine
BOUND = 64 << 20
PROMPT, MOST, PAGES = 80, 40, 12
"""Six requests that all have MOST tokens of their answers hold twice what PAGES of 32 tokens are."""
SAMPLINGS: dict[int, dict[str, Any]] = {
    4: {"temperature": 1.0, "sampling_seed": 7, "top_p": 0.9, "top_k": 50},
    5: {"regex": "[a-z ]{1100,1200}", "ignore_eos": False},
}
"""Of the requests that are not greedy: what depends on the tokens so far goes on behind a page-out, too. The grammar is
longer than 250 tokens of its answer, so that nobody ends early."""


@pytest.fixture
async def kept(rig: Rig) -> AsyncIterator[HostPool]:
    accounts = rig.folder / "accounts"
    write_kv_settings(accounts, KvSettings(host_bytes=BOUND))
    yield HostPool(host_pool_directory(accounts), BOUND)
    drop_host_pool(accounts)


@pytest.mark.parametrize(("devices", "samplings"), [(1, SAMPLINGS), pytest.param(2, SAMPLINGS, marks=pytest.mark.slow)])
async def test_requests_take_turns(
    rig: Rig, kept: HostPool, wide_model: Path, devices: int, samplings: dict[int, dict[str, Any]]
) -> None:
    prompts = [prompt(20 + i, PROMPT) for i in range(6)]
    spec = replace(rig.spec_at(wide_model, tp=devices), scheduling=Scheduling.FAIR)
    handle = await rig.activate(spec, rig.devices[:devices])
    try:
        wanted = [reference(wide_model, asked, MOST) for asked in prompts]
        for i, sampling in samplings.items():
            wanted[i] = await rig.ask(handle, tokenized("", prompts[i], MOST, **sampling))
        rig.finish.clear()
        page_bytes = rig.pool.memory[rig.devices[0]].page_bytes
        handle.set_kv_limit(PAGES * page_bytes // devices)
        # Answers that would go on for long: whoever is in stays for as long, if it is not taken out.
        rids = [rig.submit(handle, tokenized("", p, 250, **samplings.get(i, {}))) for i, p in enumerate(prompts)]
        for rid in rids:
            assert len(await rig.wait_tokens(rid, MOST)) >= MOST
        assert not rig.finish, "nobody had to end before all others went on"
        await happens(lambda: handle.load is not None and handle.load.kv_brought_tokens, "KV coming back")
        late = rig.submit(handle, tokenized("", prompt(30, PROMPT), 5))
        assert await rig.answer(late) == reference(wide_model, prompt(30, PROMPT), 5)
        assert not rig.finish.keys() - {late}, "who comes late and asks for little is served among the others"
        assert [rig.tokens[rid][:MOST] for rid in rids] == wanted
    finally:
        await handle.deactivate()
    assert all(rig.free_bytes(i) == DEVICE_BYTES for i in range(2))
    assert kept.use().booked_bytes == kept.use().file_bytes
