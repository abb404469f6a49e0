"""What anybody may ask: the models, and whether the server is well."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request, Response

from prism import __version__
from prism.config.sections.model import AdapterConfig, ModelConfig
from prism.core.ids import ModelName
from prism.obs import names
from prism.obs.metrics import CONTENT_TYPE
from prism.server.errors import unavailable
from prism.server.front import Front
from prism.server.views import devices_view
from prism.store.values import StoreError

AGENT_SILENT_S = 30.0
"""Agents announce themselves every second; on a machine short of processors a living one misses some."""
FAULTS_WAIT_S = 0.5
"""So long ``/health`` asks the store for faults."""


def public_router(front: Front) -> APIRouter:
    router = APIRouter()
    _models(router, front)
    _wellness(router, front)
    _signpost(router)
    return router


def _signpost(router: APIRouter) -> None:
    @router.get("/", tags=["operation"])
    async def where() -> dict[str, str]:
        """Where things are."""
        return {
            "name": "prism",
            "version": __version__,
            "api": "/v1",
            "models": "/v1/models",
            "openapi": "/openapi.json",
            "health": "/health",
            "readiness": "/readiness",
            "metrics": "/metrics",
            "admin": "/admin/status",
        }

    router.add_api_route("/", where, methods=["HEAD"], include_in_schema=False)


def _models(router: APIRouter, front: Front) -> None:
    @router.get("/v1/models", tags=["openai"])
    async def models(request: Request) -> dict[str, Any]:
        """Every model and adapter the caller may use, loaded or not (``state``)."""
        caller, catalog = front.gate.caller(request.headers), front.catalog
        usable = [e for e in catalog.entries if catalog.may_use(caller.key, e.name)]
        await front.models.learn([catalog.model(name) for name in {catalog.served_by(e.name) for e in usable}])
        return {"object": "list", "data": [_model(front, entry) for entry in usable]}

    @router.get("/v1/models/{name:path}", tags=["openai"])
    async def model(name: str, request: Request) -> dict[str, Any]:
        caller = front.gate.caller(request.headers)
        known = await front.find(name)
        front.gate.check_model(caller, known)
        catalog = front.catalog
        await front.models.learn([catalog.model(catalog.served_by(known))])
        return _model(front, catalog.adapters_by_name.get(known) or catalog.model(known))


def _model(front: Front, model: ModelConfig | AdapterConfig) -> dict[str, Any]:
    """OpenAI's object with what stock servers add (``root``, ``parent``, ``max_model_len``) and Prism does. An adapter
    is where its base is."""
    base = front.catalog.served_by(model.name)
    context_tokens = front.models.context_tokens(base)
    return {
        "id": model.name,
        "object": "model",
        "created": int(front.started_s),
        "owned_by": "prism",
        "root": base,
        "parent": None if base == model.name else base,
        "max_model_len": context_tokens,
        "state": front.placements.state(base),
        "aliases": list(model.aliases),
        "context_length": context_tokens,
        "kind": front.models.kind(base),
    }


def _wellness(router: APIRouter, front: Front) -> None:
    @router.get("/health", tags=["operation"])
    async def health() -> dict[str, Any]:
        """200 while this worker's loop turns. ``faults``: devices that are out of service, and why."""
        found = await _faults(front)
        return {"status": "degraded", "faults": found} if found else {"status": "ok"}

    @router.get("/readiness", tags=["operation"], responses={503: {"description": "Something is missing"}})
    async def readiness(response: Response) -> dict[str, Any]:
        """200 when requests can be served: the store answers, a controller leads, an agent lives."""
        missing = await _missing(front)
        response.status_code = 503 if missing else 200
        return {"ready": not missing, "missing": missing}

    for path, answer in (("/health", health), ("/readiness", readiness)):
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    @router.get("/metrics", tags=["operation"])
    async def metrics() -> Response:
        """Prometheus text of all processes of this server."""
        _gauges(front)
        return Response(front.metrics_text(), media_type=CONTENT_TYPE)


async def _missing(front: Front) -> list[str]:
    if front.draining:
        return ["the server is stopping"]
    try:
        await front.store.ping()
        controller = await front.store.controller()
        agents = await front.store.agents()
        devices = await devices_view(front)
    except StoreError:
        return ["the store does not answer"]
    alive = [agent for agent in agents if time.time() - agent.seen_s < AGENT_SILENT_S]
    found = [] if controller is not None else ["no controller holds the lease"]
    if devices and all(device["fault"] for device in devices):
        found += [f"{device['id']} is out of service: {device['fault']}" for device in devices]
    return found if alive else [*found, "no node agent is alive"]


async def _faults(front: Front) -> dict[str, str]:
    """By device, as the controller published it last; empty where the store does not say so soon: a worker that lives
    says that it does."""
    try:
        async with asyncio.timeout(FAULTS_WAIT_S):
            return {device["id"]: device["fault"] for device in await devices_view(front) if device["fault"]}
    except (StoreError, TimeoutError):
        return {}


def _gauges(front: Front) -> None:
    """Counts of open requests, set when somebody looks."""
    streaming: dict[str, int] = {}
    for stream in front.broker.streams.values():
        if stream.first_token_s is not None:
            streaming[stream.model] = streaming.get(stream.model, 0) + 1
    for model in front.catalog.models:
        name = ModelName(model.name)
        front.metrics.set(names.WAITING, front.broker.waiting.get(name, 0), model=name)
        front.metrics.set(names.STREAMING, streaming.get(name, 0), model=name)


__all__ = ["public_router", "unavailable"]
