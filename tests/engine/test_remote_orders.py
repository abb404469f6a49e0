"""Orders to an engine that runs layers for others, as they come: between two of these layers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prism.core.pace import DevicePace
from prism.remote.link import PeerLink
from prism.remote.messages import VERSION, HiddenStates, PeerHello, PeerWelcome, Refused, RunPieces
from tests.engine.rig import Rig, opened, prompt, tokenized
from tests.engine.test_remote_layers import NEW, pair
from tests.patience import happens

pytestmark = pytest.mark.engine
SLOTS = 64


def paced(zygote: Path, demo_models: Path, layer_s: float) -> AbstractAsyncContextManager[Rig]:
    return opened(zygote, demo_models, pace=DevicePace(layer_s=layer_s))


async def heard(link: PeerLink) -> Any:
    """The next message."""
    (received, *_) = await happens(link.receive, "an answer")
    return received.message


@asynccontextmanager
async def greeted(path: Path) -> AsyncIterator[PeerLink]:
    """A leader without an engine."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    link = PeerLink(sock)
    try:
        link.send(PeerHello(version=VERSION, engine="nobody", model="other", slots=SLOTS))
        refused = await heard(link)
        assert isinstance(refused, Refused)
        identity = refused.reason.split("this engine's ")[-1]
        link.send(PeerHello(version=VERSION, engine="nobody", model=identity, slots=SLOTS))
        assert isinstance(await heard(link), PeerWelcome)
        yield link
    finally:
        link.release()


def prefill(batch: int, end: int, tokens: int = 3) -> RunPieces:
    """Of a prompt, in all pieces before ``end``."""
    each = list(range(tokens))
    slots = [1 + i for i in each]
    table: dict[str, Any] = {"table_rows": [0] * tokens, "table_positions": each, "table_slots": slots}
    lens: dict[str, Any] = {"seq_lens": [tokens], "prefix_lens": [0], "extend_lens": [tokens]}
    one: dict[str, Any] = {"rows": [0], "out_slots": slots, "positions": each, "token_ids": [5 + i for i in each]}
    return RunPieces(batch=batch, first=0, end=end, decode=False, **one, **table, **lens)


async def test_an_order_does_not_wait_for_what_is_run_for_a_leader(zygote: Path, demo_models: Path) -> None:
    """Layers of most of a second each: the order is carried out before the batch is through, and the batch goes on."""
    async with paced(zygote, demo_models, 0.7) as rig, pair(rig, "demo-llama") as p, greeted(p.path) as link:
        link.send(prefill(1, p.pieces - 1))
        await asyncio.sleep(0.2)  # it is in its first layer; had it not begun, the order would be first anyway
        await p.whole.remote.serve_layers(p.path)
        assert not link.receive(), "the batch is not through"
        link.send(prefill(2, p.pieces - 1))
        answers = [await heard(link), await heard(link)]
        assert [(type(one), one.batch) for one in answers] == [(HiddenStates, 1), (HiddenStates, 2)]


async def test_answers_are_the_same_however_often_the_peer_is_called_away(zygote: Path, demo_models: Path) -> None:
    async with paced(zygote, demo_models, 0.03) as rig, pair(rig, "demo-llama", chunked_prefill_size=16) as p:
        await p.leader.remote.set_route(p.over(p.path, 1, p.pieces - 1))
        prompts = [prompt(80 + i, 10 + 9 * i) for i in range(4)]
        rids = [rig.submit(p.leader, tokenized("", q, NEW // 2)) for q in prompts]
        own = rig.submit(p.whole, tokenized("", prompt(90), NEW // 2))
        answers = asyncio.gather(*(rig.answer(rid) for rid in (*rids, own)))
        while not answers.done():
            await p.whole.remote.serve_layers(p.path)
        for answer, q in zip(await answers, (*prompts, prompt(90)), strict=True):
            assert answer == rig.reference(p.name, q, NEW // 2)
