"""An engine that has only some layers answers as one that has all: token for token, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prism.engine.errors import OrderRefused
from prism.engine.handle import EngineHandle
from prism.remote.link import PeerLink
from prism.remote.messages import Refused, RunPieces
from prism.remote.orders import KvWay, RouteStop
from prism.weights.store.weight_store import WeightStore
from tests.engine.rig import Rig, prompt, tokenized
from tests.engine.slow_image import SlowImage
from tests.patience import happens

pytestmark = pytest.mark.engine
NEW = 24
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "sampling_seed": 7}


@dataclass
class Pair:
    """An engine with all layers that serves them at ``path``, and one that leads."""

    rig: Rig
    name: str
    whole: EngineHandle
    leader: EngineHandle
    path: Path

    @property
    def pieces(self) -> int:
        return int(json.loads((self.rig.models / self.name / "config.json").read_text())["num_hidden_layers"]) + 2

    def over(self, path: Path, first: int, end: int) -> list[RouteStop]:
        """Pieces [first, end) at ``path``, the others here."""
        here = [RouteStop("", 0, first)] if first else []
        return [*here, RouteStop(str(path), first, end), RouteStop("", end, self.pieces)]

    def alone(self) -> list[RouteStop]:
        return [RouteStop("", 0, self.pieces)]

    async def check(self, seeds: tuple[int, ...], length: int = 30) -> None:
        """Requests of different lengths at once, against Hugging Face."""
        prompts = [prompt(seed, length + 11 * i) for i, seed in enumerate(seeds)]
        rids = [self.rig.submit(self.leader, tokenized("", p, NEW)) for p in prompts]
        for rid, p in zip(rids, prompts, strict=True):
            assert await self.rig.answer(rid) == self.rig.reference(self.name, p, NEW)


@asynccontextmanager
async def pair(rig: Rig, name: str, **engine_args: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        spec = rig.spec(name, **engine_args)
        first = await rig.activate(spec, [rig.devices[1]])
        await first.deactivate()  # it leaves an image
        whole = await rig.activate(spec, [rig.devices[0]])
        stack.push_async_callback(whole.deactivate)
        leader = await rig.activate(spec, [rig.devices[1]])
        stack.push_async_callback(leader.deactivate)
        path = rig.folder / "whole.layers"
        rig.pool.memory[rig.devices[0]].offer(0)
        await whole.remote.serve_layers(path)
        yield Pair(rig, name, whole, leader, path)


def numbers(found: Any) -> list[float]:
    """All fractions in what was decoded, in order."""
    if isinstance(found, float):
        return [found]
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [number for part in parts for number in numbers(part)]


def lent_bytes(rig: Rig, device: int) -> int:
    return sum(owner.lent_bytes for owner in rig.pool.memory[rig.devices[device]].stats().owners)


@pytest.mark.parametrize("name", ["demo-llama", pytest.param("demo-qwen3", marks=pytest.mark.slow)])
async def test_layers_in_another_engine(rig: Rig, name: str) -> None:
    async with pair(rig, name, chunked_prefill_size=32, enable_mixed_chunk=True) as p:
        head = p.pieces - 1
        await p.leader.remote.set_route(p.over(p.path, 2, head))
        before = rig.pool.memory[rig.devices[1]].stats()
        await p.leader.remote.hold_pieces([0, 1, head])
        after = rig.pool.memory[rig.devices[1]].stats()
        assert sum(o.weights_bytes for o in after.owners) < sum(o.weights_bytes for o in before.owners)
        await p.check((1, 2, 3, 4), length=50)  # longer than a chunk: prompts in pieces, mixed with decoding
        await p.check((1, 2))  # prefixes that are in the tree
        assert lent_bytes(rig, 0) > 0
        for sampling, logprobs in ((SAMPLED, False), ({}, True)):
            request = {"logprobs": logprobs, **sampling}
            both = [rig.submit(e, tokenized("", prompt(9, 70), NEW, **request)) for e in (p.leader, p.whole)]
            answers = [await rig.answer(rid) for rid in both]
            assert answers[0] == answers[1]
            if logprobs:
                led, alone = (
                    numbers([msgspec.msgpack.decode(i.extra) for i in rig.items[rid] if i.extra]) for rid in both
                )
                assert len(led) > 2 * NEW
                assert led == pytest.approx(alone, abs=1e-3)  # sums depend on who shared a batch
        with pytest.raises(OrderRefused, match="only"):
            await p.leader.remote.hold_pieces([head])
        await p.leader.remote.hold_pieces(range(p.pieces))
        await p.leader.remote.set_route(p.alone())
        await p.check((1, 5))
    assert all(rig.pool.memory[d].stats().owners == () or rig.free_bytes(i) for i, d in enumerate(rig.devices))


async def test_a_peer_killed_in_mid_batch_is_replaced_by_another_and_then_by_nobody(rig: Rig) -> None:
    """The leader lacks layers; its requests go on over the next route, and wait when there is none."""
    async with pair(rig, "demo-llama") as p:
        head = p.pieces - 1
        second = await rig.activate(rig.spec(p.name), [rig.devices[0]])
        other = rig.folder / "second.layers"
        await second.remote.serve_layers(other)
        nobody = p.over(rig.folder / "nobody", 2, head)
        await p.leader.remote.set_route(p.over(p.path, 2, head), nobody, p.over(other, 2, head))
        await p.leader.remote.hold_pieces([0, 1, head])
        prompts = [prompt(30 + i, 40 + 5 * i) for i in range(4)]
        rids = [rig.submit(p.leader, tokenized("", q, 3 * NEW)) for q in prompts]
        await rig.wait_tokens(rids[0], 5)
        await happens(lambda: _leaders(p.whole) == list(p.leader.workers), "the peer says for whom it runs layers")
        assert _leaders(second) == [], "it is a fallback"
        os.kill(p.whole.pids[0], signal.SIGKILL)
        await rig.wait_tokens(rids[0], 3 * NEW // 2)
        await happens(lambda: _leaders(second) == list(p.leader.workers), "the fallback is the peer now")
        os.kill(second.pids[0], signal.SIGKILL)
        await p.leader.remote.hold_pieces(range(p.pieces))  # nobody is left: they wait until the layers are here
        await p.leader.remote.set_route(p.alone())
        for rid, q in zip(rids, prompts, strict=True):
            assert await rig.answer(rid) == rig.reference(p.name, q, 3 * NEW)
        await p.check((1, 2))


async def test_long_prompts_go_over_the_route_in_parts(rig: Rig) -> None:
    """Parts of one prompt and of several at once, behind prefixes that are in the tree, before and behind the peer's
    layers; and a peer that dies with some of them."""
    async with pair(rig, "demo-llama") as p:
        head = p.pieces - 1
        begins_there = [RouteStop(str(p.path), 0, 3), RouteStop("", 3, p.pieces)]
        for route in (p.over(p.path, 2, head), p.over(p.path, 1, 3), begins_there):
            await p.leader.remote.set_route(route)
            before = _parts(p.leader)
            await p.check((41,), length=300)
            await p.check((42, 43, 44), length=170)
            await p.check((42, 45), length=320)  # the first goes on from what is in the tree
            await happens(lambda n=before: _parts(p.leader) >= n + 2, "prompts went in parts")
        await p.leader.remote.set_route(p.over(p.path, 2, head), whole_prefills=True)
        before = _parts(p.leader)
        await p.check((46,), length=300)
        assert _parts(p.leader) == before
        await p.leader.remote.set_route(p.over(p.path, 2, head), p.alone())
        os.kill(p.whole.pids[0], signal.SIGSTOP)  # it takes questions, and answers none
        long = prompt(47, 400)
        rid = rig.submit(p.leader, tokenized("", long, NEW))
        await asyncio.sleep(1.0)  # by now they are, as a rule: an engine that waits for them tells nothing
        os.kill(p.whole.pids[0], signal.SIGKILL)
        assert await rig.answer(rid) == rig.reference(p.name, long, NEW)


@pytest.mark.slow
async def test_a_peer_that_gets_nonsense_or_has_no_memory_lives_and_the_leader_goes_on(rig: Rig) -> None:
    async with pair(rig, "demo-llama") as p:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(p.path))
            stranger.sendall(b"\xff" * 1000)
        reader = PeerLink(_connected(p.path))
        reader.send(RunPieces(batch=1, first=0, end=1, decode=True, rows=[0], seq_lens=[1], **_token(0)))
        assert "not said who it is" in (await _reply(reader)).reason
        reader.release()
        await p.leader.remote.set_route(p.over(p.path, 1, 3), p.alone())
        await p.check((1, 2))
        rig.pool.memory[rig.devices[0]].offer(None)  # what the peer has lent is due
        await p.check((3, 4, 5), length=60)
        with pytest.raises(OrderRefused, match="which has"):
            await p.leader.remote.set_route([RouteStop(str(p.path), 0, p.pieces + 1)])
        with pytest.raises(OrderRefused, match="ends with piece"):
            await p.leader.remote.set_route([RouteStop(str(p.path), 0, p.pieces)])
        with pytest.raises(OrderRefused, match="FileNotFoundError"):
            await p.leader.remote.set_route(p.over(rig.folder / "nobody", 1, 3))
        assert await rig.ask(p.whole, tokenized("", prompt(1), NEW)) == rig.reference(p.name, prompt(1), NEW)


def _token(slot: int) -> dict[str, Any]:
    table: dict[str, Any] = {"table_rows": [], "table_positions": [], "table_slots": []}
    return {"out_slots": [slot], "positions": [0], "token_ids": [1], **table}


def _connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(path))
    return sock


async def _reply(link: PeerLink) -> Refused:
    received = await happens(link.receive, "an answer")
    assert isinstance(received[0].message, Refused)
    return received[0].message


@pytest.mark.parametrize("kv", [KvWay.FETCH, pytest.param(KvWay.RECOMPUTE, marks=pytest.mark.slow)])
async def test_an_engine_serves_while_its_weights_arrive(rig: Rig, kv: KvWay) -> None:
    """It begins with one layer of four, takes the others over as they come, and ends alone; no token changes."""
    async with AsyncExitStack() as stack:
        spec = rig.spec("demo-llama")
        first = await rig.activate(spec, [rig.devices[1]])
        await first.deactivate()  # it leaves an image
        whole = await rig.activate(spec, [rig.devices[0]])
        image = SlowImage(WeightStore(rig.folder / "store"), "demo-llama")
        stack.callback(image.close)
        image.arrive(0, 1, 5)
        leader = await rig.activate(spec, [rig.devices[1]], first_pieces=[0, 1, 5])
        stack.push_async_callback(leader.deactivate)
        p = Pair(rig, "demo-llama", whole, leader, rig.folder / "whole.layers")
        prompts = [prompt(60 + i, 40 + 9 * i) for i in range(4)]
        rids = [rig.submit(leader, tokenized("", q, 5 * NEW)) for q in prompts]
        rig.pool.memory[rig.devices[0]].offer(0)
        await whole.remote.serve_layers(p.path)
        await leader.remote.set_route(p.over(p.path, 2, 5))
        await leader.remote.grow_route(kv)
        for i, piece in enumerate((3, 2, 4)):  # in any order
            await rig.wait_tokens(rids[0], 15 * (i + 1))
            assert rids[0] not in rig.finish
            image.arrive(piece)
        for rid, q in zip(rids, prompts, strict=True):
            assert await rig.answer(rid) == rig.reference(p.name, q, 5 * NEW)
        await happens(lambda: lent_bytes(rig, 0) == 0, "the peer is needed no more")
        await whole.deactivate()
        await p.check((61, 7), length=40)  # one of them is in the prefix tree
        if kv is KvWay.FETCH:
            await happens(lambda: leader.load and leader.load.kv_brought_tokens > 0, "KV was fetched")
        else:
            told = await happens(lambda: leader.load, "what the leader did is told")
            assert told.kv_brought_tokens == 0


async def test_engines_that_have_all_layers_only_together(rig: Rig) -> None:
    """Three that load, none of which has everything: the first two lead over each other, the third over both of them.
    One is killed; what the others have brings them on, and in the end each is alone."""
    async with AsyncExitStack() as stack:
        spec = rig.spec("demo-llama")
        first = await rig.activate(spec, [rig.devices[1]])
        await first.deactivate()  # it leaves an image
        has = {"low": [0, 1, 2, 5], "high": [0, 1, 3, 4, 5], "little": [0, 1, 5]}
        engines: dict[str, EngineHandle] = {}
        for i, (name, pieces) in enumerate(has.items()):
            engines[name] = await rig.activate(spec, [rig.devices[i % 2]], first_pieces=pieces)
            rig.pool.memory[rig.devices[i % 2]].offer(0)
            await engines[name].remote.serve_layers(rig.folder / name)
        for name in ("high", "little"):
            stack.push_async_callback(engines[name].deactivate)
        low, high = str(rig.folder / "low"), str(rig.folder / "high")
        routes = {
            "low": [RouteStop("", 0, 3), RouteStop(high, 3, 5), RouteStop("", 5, 6)],
            "high": [RouteStop("", 0, 2), RouteStop(low, 2, 3), RouteStop("", 3, 6)],
            "little": [RouteStop("", 0, 2), RouteStop(low, 2, 3), RouteStop(high, 3, 5), RouteStop("", 5, 6)],
        }
        await asyncio.gather(*(engines[name].remote.set_route(route) for name, route in routes.items()))
        both = [Pair(rig, "demo-llama", engines["high"], engines[name], rig.folder) for name in routes]
        await asyncio.gather(*(p.check((70, 71), length=40) for p in both))
        told = engines["little"].load
        assert told and told.remote and len(told.remote.peers) == 2
        prompts = [prompt(75 + i, 30 + 9 * i) for i in range(4)]
        rids = [rig.submit(engines[n], tokenized("", q, 3 * NEW)) for n in ("high", "little") for q in prompts]
        await asyncio.gather(*(rig.wait_tokens(rid, 3) for rid in rids))
        os.kill(engines["low"].pids[0], signal.SIGKILL)
        for name in ("high", "little"):  # one of the two peers of the latter lives, and is of no use
            await happens(lambda n=name: not _peers(engines[n]), "its saying that it needs another route")
        await asyncio.gather(engines["high"].remote.grow_route(order=[4, 3, 2]), engines["little"].remote.grow_route())
        for rid, q in zip(rids, 2 * prompts, strict=True):
            assert await rig.answer(rid) == rig.reference("demo-llama", q, 3 * NEW)
        for name in ("high", "little"):
            await happens(lambda n=name: _alone(engines[n]), "it goes on alone")


async def test_an_engine_without_embedding_and_head_runs_layers_and_leads_when_they_are_here(rig: Rig) -> None:
    """Another one leads over it meanwhile; then each leads over the other, and in the end it is alone."""
    async with AsyncExitStack() as stack:
        spec = rig.spec("demo-llama")
        first = await rig.activate(spec, [rig.devices[1]])
        await first.deactivate()  # it leaves an image
        image = SlowImage(WeightStore(rig.folder / "store"), "demo-llama")
        stack.callback(image.close)
        image.arrive(0, 1, 2, 5)
        engines: dict[str, EngineHandle] = {}
        for i, (name, pieces) in enumerate({"low": [0, 1, 2, 5], "high": [1]}.items()):
            engines[name] = await rig.activate(spec, [rig.devices[i]], first_pieces=pieces)
            rig.pool.memory[rig.devices[i]].offer(0)
            await engines[name].remote.serve_layers(rig.folder / name)
            stack.push_async_callback(engines[name].deactivate)
        image.arrive(3, 4)
        await engines["high"].remote.grow_route(order=[3, 4, 0, 5, 2])
        await happens(lambda: _pieces(engines["high"]) >= {1, 3, 4}, "its having layers for others")
        low, high = str(rig.folder / "low"), str(rig.folder / "high")
        await engines["low"].remote.set_route([RouteStop("", 0, 3), RouteStop(high, 3, 5), RouteStop("", 5, 6)])
        await Pair(rig, "demo-llama", engines["high"], engines["low"], rig.folder).check((80, 81), length=40)
        await happens(lambda: _pieces(engines["high"]) >= {0, 5}, "its having embedding and head")
        await engines["high"].remote.set_route([RouteStop("", 0, 2), RouteStop(low, 2, 3), RouteStop("", 3, 6)])
        await Pair(rig, "demo-llama", engines["low"], engines["high"], rig.folder).check((82, 80), length=40)
        await engines["high"].remote.grow_route()
        await happens(lambda: _alone(engines["high"]), "it goes on alone")


async def test_an_engine_that_cannot_run_layers_apart_waits_for_all_of_them(rig: Rig) -> None:
    """It was to begin with some pieces, and says that it has all."""
    spec = rig.spec("demo-llama", page_size=16)
    first = await rig.activate(spec, [rig.devices[1]])
    await first.deactivate()  # it leaves an image
    image = SlowImage(WeightStore(rig.folder / "store"), "demo-llama")
    with closing(image):
        image.arrive(0, 1, image.layers + 1)
        engine = await rig.activate(spec, [rig.devices[1]], first_pieces=[0, 1, image.layers + 1])
        rid = rig.submit(engine, tokenized("", prompt(90), NEW))
        image.arrive(*range(2, image.layers + 1))
        with pytest.raises(OrderRefused, match="pages of 16 tokens") as refused:
            await engine.remote.grow_route()
        assert refused.value.whole_only, "nor would it do anything else of the kind"
        assert await rig.answer(rid) == rig.reference("demo-llama", prompt(90), NEW)
        await engine.deactivate()


def _leaders(engine: EngineHandle) -> list[str]:
    return engine.load.remote.leaders if engine.load and engine.load.remote else []


def _peers(engine: EngineHandle) -> list[str]:
    return engine.load.remote.peers if engine.load and engine.load.remote else []


def _parts(engine: EngineHandle) -> int:
    return engine.load.remote.parts if engine.load and engine.load.remote else 0


def _pieces(engine: EngineHandle) -> set[int]:
    return set(engine.load.remote.pieces) if engine.load and engine.load.remote else set()


def _alone(engine: EngineHandle) -> bool:
    return bool(engine.load and engine.load.remote and engine.load.remote.alone)
