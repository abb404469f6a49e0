"""Cluster state in Redis hashes and strings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from prism.core.ids import ModelName, NodeId
from prism.store.connection import LOST, Connection
from prism.store.rates import verdict
from prism.store.values import (
    FRONT_DEAD,
    AgentRecord,
    ControllerRecord,
    LeaseLost,
    PlacementChange,
    RateVerdict,
    Replica,
)
from prism.wire import keys

_json = msgspec.json.Encoder()
_replicas = msgspec.json.Decoder(list[Replica])
_agent = msgspec.json.Decoder(AgentRecord)
_controller = msgspec.json.Decoder(ControllerRecord)


def _read_replicas(data: bytes) -> list[Replica]:
    """What another version of Prism wrote counts as nowhere, until the controller has written it again."""
    try:
        return _replicas.decode(data)
    except msgspec.ValidationError:
        return []


class RedisState:
    """The state half of :class:`prism.store.redis.RedisStore`."""

    def __init__(self, connection: Connection) -> None:
        self._conn = connection

    async def _run(self, name: str, *args: Any, **options: Any) -> Any:
        return await self._conn.run(lambda: getattr(self._conn.client, name)(*args, **options))

    async def placement(self) -> dict[ModelName, list[Replica]]:
        rows = await self._run("hgetall", keys.PLACEMENT)
        return {ModelName(model.decode()): _read_replicas(data) for model, data in rows.items()}

    async def set_placement(self, model: ModelName, replicas: Sequence[Replica], holder: ControllerRecord) -> None:
        data = _json.encode(list(replicas)) if replicas else b""
        args: list[str | bytes | int | float] = [keys.GROUP, holder.fence, model, data, keys.PLACEMENT_CHANGED]
        if not await self._conn.script("SET_PLACEMENT", [keys.PLACEMENT, keys.CONTROLLER], args):
            raise LeaseLost(f"controller {holder.id} (fence {holder.fence}) may not place {model}: its lease is lost")

    async def watch_placement(self) -> AsyncIterator[PlacementChange]:
        while True:
            pubsub = self._conn.client.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(keys.PLACEMENT_CHANGED)
                yield PlacementChange(None)
                async for message in pubsub.listen():
                    yield PlacementChange(ModelName(message["data"].decode()))
            except LOST:
                await asyncio.sleep(0.1)
            finally:
                with contextlib.suppress(*LOST):
                    await pubsub.aclose()

    async def announce_agent(self, agent: AgentRecord) -> None:
        await self._run("hset", keys.AGENTS, agent.node, _json.encode(agent))

    async def remove_agent(self, node: NodeId) -> None:
        await self._run("hdel", keys.AGENTS, node)

    async def agents(self) -> list[AgentRecord]:
        return [_agent.decode(data) for data in await self._run("hvals", keys.AGENTS)]

    async def announce_front(self, mailbox: str, seen_s: float) -> None:
        await self._run("hset", keys.FRONTS, mailbox, repr(seen_s))

    async def bury_front(self, mailbox: str) -> None:
        await self.announce_front(mailbox, FRONT_DEAD)

    async def remove_front(self, mailbox: str) -> None:
        await self._run("hdel", keys.FRONTS, mailbox)

    async def fronts(self) -> dict[str, float]:
        return {name.decode(): float(seen) for name, seen in (await self._run("hgetall", keys.FRONTS)).items()}

    async def acquire_lease(self, controller: str, mailbox: str, ttl_s: float) -> ControllerRecord | None:
        args: list[str | bytes | int | float] = [keys.GROUP, controller, mailbox, int(ttl_s * 1000)]
        fence = int(await self._conn.script("ACQUIRE", [keys.CONTROLLER, keys.CONTROLLER_FENCE], args))
        return ControllerRecord(id=controller, mailbox=mailbox, fence=fence) if fence else None

    async def renew_lease(self, holder: ControllerRecord, ttl_s: float) -> bool:
        args: list[str | bytes | int | float] = [keys.GROUP, holder.fence, max(1, int(ttl_s * 1000))]
        return bool(await self._conn.script("RENEW", [keys.CONTROLLER], args))

    async def release_lease(self, holder: ControllerRecord) -> None:
        await self._conn.script("RENEW", [keys.CONTROLLER], [keys.GROUP, holder.fence, 0])

    async def controller(self) -> ControllerRecord | None:
        data = await self._run("get", keys.CONTROLLER)
        return _controller.decode(data) if data else None

    async def catalog_generation(self) -> int:
        return int(await self._run("get", keys.CATALOG_GENERATION) or 0)

    async def bump_catalog_generation(self) -> int:
        return int(await self._run("incr", keys.CATALOG_GENERATION))

    async def rate_take(self, bucket: str, amount: int, per_minute: int, now_s: float) -> RateVerdict:
        args: list[str | bytes | int | float] = [keys.GROUP, amount, per_minute, repr(now_s)]
        allowed, level = await self._conn.script("RATE", [keys.rate_bucket(bucket)], args)
        return verdict(bool(allowed), float(level), amount, per_minute)

    async def count(self, counters: Mapping[str, float]) -> None:
        async def add() -> None:
            async with self._conn.client.pipeline(transaction=True) as pipe:
                for name, amount in counters.items():
                    pipe.hincrbyfloat(keys.COUNTERS, name, amount)
                await pipe.execute()

        if counters:
            await self._conn.run(add)

    async def counters(self, prefix: str = "") -> dict[str, float]:
        rows = await self._run("hgetall", keys.COUNTERS)
        return {name.decode(): float(n) for name, n in rows.items() if name.decode().startswith(prefix)}

    async def append_decision(self, line: str, keep: int = 10_000) -> None:
        async def add() -> None:
            async with self._conn.client.pipeline(transaction=True) as pipe:
                pipe.lpush(keys.DECISIONS, line)
                pipe.ltrim(keys.DECISIONS, 0, keep - 1)
                await pipe.execute()

        await self._conn.run(add)

    async def decisions(self, count: int = 100) -> list[str]:
        return [line.decode() for line in await self._run("lrange", keys.DECISIONS, 0, count - 1)]

    async def put_doc(self, name: str, document: str) -> None:
        await self._run("hset", keys.DOCS, name, document)

    async def doc(self, name: str) -> str | None:
        data = await self._run("hget", keys.DOCS, name)
        return data.decode() if data else None
