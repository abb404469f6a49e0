"""The operators' calls, under ``/admin``. All need an admin key."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Body, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from prism.core.ids import ModelName
from prism.obs.decisions import read_decisions
from prism.server.errors import ApiError, cancelled, invalid
from prism.server.front import Front
from prism.server.origins import check_site
from prism.server.usage import holders, merged
from prism.server.views import config_view, devices_view, document, entry_view, models_view
from prism.wire.messages import CommandResult, Failed

CHANGE_S: Final = 840.0
"""A large model from a slow disk takes minutes to load, and long answers to finish; `prism` waits a little longer."""


class Devices(BaseModel):
    """Where a command applies."""

    model_config = ConfigDict(extra="forbid")
    devices: list[str] = []
    carry: bool = False
    """Move running requests with their tokens instead of letting them finish."""


class LoadOn(BaseModel):
    model_config = ConfigDict(extra="forbid")
    devices: list[str] = []
    """Empty: the scheduler chooses."""
    instances: int = Field(default=1, ge=1, le=1000)
    """So many, each on devices of its own. Not together with ``devices``."""


def admin_router(front: Front) -> APIRouter:
    """Routes over ``front``. Model names may hold slashes."""

    async def check(request: Request) -> None:
        check_site(request.headers, request.scope.get("server"), front.catalog.server.cors_origins)
        front.gate.admin(request.headers)

    router = APIRouter(prefix="/admin", tags=["admin"], dependencies=[Depends(check)])
    _reading(router, front)
    _model_commands(router, front)
    _cluster_commands(router, front)
    return router


def _reading(router: APIRouter, front: Front) -> None:
    @router.get("/models")
    async def models() -> dict[str, Any]:
        await front.catch_up()
        return {"models": await models_view(front)}

    @router.get("/devices")
    async def devices() -> dict[str, Any]:
        return {"devices": await devices_view(front)}

    @router.get("/plan")
    async def plan() -> dict[str, Any]:
        """What the scheduler would do now, and why."""
        return (await front.broker.commands.call("plan", timeout_s=10.0)).detail

    @router.get("/snapshot")
    async def snapshot() -> dict[str, Any]:
        """The state that the scheduler decides on, for a dry run of another policy (`prism sim --dry-run`)."""
        return {"devices": [], "models": [], **await document(front, "cluster")}

    @router.get("/pool")
    async def pool() -> dict[str, Any]:
        """Which machine's memory has which packs of weights (the parameter pool)."""
        found: dict[str, Any] = {"entries": [], "machines": [], **await document(front, "pool")}
        return found

    @router.get("/decisions")
    async def decisions(last: Annotated[int, Query(ge=1, le=10_000)] = 100) -> dict[str, Any]:
        return {"decisions": await _decisions(front, last)}

    @router.get("/requests")
    async def requests() -> dict[str, Any]:
        """Requests that have not ended; a choice of a request counts by itself."""
        use = await merged(front.store, front.catalog.server.front_workers)
        fresh = [r for r in use.requests if time.time() - use.at_s < 30]
        return {"requests": msgspec.to_builtins(fresh)}

    @router.get("/status")
    async def status() -> dict[str, Any]:
        found = await document(front, "status")
        redis = {**found.get("redis", {}), "ok": await _store_answers(front)}
        uptime_s = time.time() - found.get("started_s", front.started_s)
        return {**found, "redis": redis, "uptime_s": round(uptime_s, 3)}

    @router.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        known = await front.find(name)
        found = await entry_view(front, known)
        lines = [line for line in await _decisions(front, 2000) if line.get("model") == known]
        return {**found, "config": config_view(front, known), "decisions": lines[:50]}


def _model_commands(router: APIRouter, front: Front) -> None:
    call = front.broker.commands.call

    @router.post("/models/{name:path}/load")
    async def load(name: str, on: Annotated[LoadOn, Body(default_factory=LoadOn)]) -> dict[str, Any]:
        if on.instances > 1 and on.devices:
            raise invalid("'instances' and 'devices' exclude each other.", "instances")
        base = front.catalog.served_by(await front.find(name))
        return _answer(await call("load", base, on.devices, instances=on.instances, timeout_s=CHANGE_S))

    @router.post("/models/{name:path}/unload")
    async def unload(name: str, on: Annotated[Devices, Body(default_factory=Devices)]) -> dict[str, Any]:
        """Waits until the model has left. A LoRA adapter leaves at once engines that run no requests of it; its base
        stays."""
        model = await front.find(name)
        if model in front.catalog.adapters_by_name:
            return _answer(await call("unload", front.catalog.served_by(model), adapter=model))
        return _answer(await call("unload", model, on.devices, carry=on.carry, timeout_s=CHANGE_S))

    @router.post("/models/{name:path}/pin")
    async def pin(name: str) -> dict[str, Any]:
        return _answer(await call("pin", await _whole_model(front, name)))

    @router.post("/models/{name:path}/unpin")
    async def unpin(name: str) -> dict[str, Any]:
        return _answer(await call("unpin", await _whole_model(front, name)))


async def _whole_model(front: Front, name: str) -> ModelName:
    """Raises :class:`ApiError` (400) for an adapter."""
    model = await front.find(name)
    if model in front.catalog.adapters_by_name:
        base = front.catalog.served_by(model)
        raise invalid(f"{model!r} is an adapter, which is where its base is: pin or unpin {base!r}.", "model")
    return model


def _cluster_commands(router: APIRouter, front: Front) -> None:
    call = front.broker.commands.call

    @router.post("/drain")
    async def drain(on: Devices) -> dict[str, Any]:
        """Empty devices: their models go elsewhere, nothing new is placed there."""
        return _answer(await call("drain", devices=_some(on), carry=on.carry))

    @router.post("/undrain")
    async def undrain(on: Devices) -> dict[str, Any]:
        return _answer(await call("undrain", devices=_some(on)))

    @router.post("/reload")
    async def reload() -> dict[str, Any]:
        """Read the catalog's file again and apply the difference."""
        result = await call("reload")
        await front.reload()
        return {"ok": True, **result.detail}

    @router.post("/requests/{request_id}/cancel")
    async def cancel(request_id: str) -> dict[str, Any]:
        if not front.broker.cancel(request_id, "by an operator"):
            await _cancel_elsewhere(front, request_id)
        return {"ok": True}


async def _cancel_elsewhere(front: Front, request_id: str) -> None:
    """A request of another worker, which ends it."""
    found = await holders(front.store, front.catalog.server.front_workers, request_id)
    if not found:
        raise ApiError(404, "request_not_found", f"No open request is called {request_id!r}.", param="request_id")
    error = cancelled("by an operator")
    for mailbox, each in found:
        failed = Failed(id=each, status=error.status, type=error.type, code=error.code, message=error.message)
        front.broker.outbox.send(mailbox, failed)


async def _decisions(front: Front, last: int) -> list[dict[str, Any]]:
    """The newest first."""
    if front.decision_log is None:
        return []
    return list(reversed(await asyncio.to_thread(read_decisions, front.decision_log, last)))


def _some(on: Devices) -> list[str]:
    if not on.devices:
        raise invalid("'devices' must name at least one device.", "devices")
    return on.devices


def _answer(result: CommandResult) -> dict[str, Any]:
    answer: dict[str, Any] = {"ok": True, "detail": result.detail}
    return {**answer, "phases": result.phases} if result.phases else answer


async def _store_answers(front: Front) -> bool:
    try:
        await front.store.ping()
    except Exception:
        return False
    return True
