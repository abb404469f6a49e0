"""The ASGI application of one front-door worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from prism import __version__
from prism.obs import names
from prism.server import openapi
from prism.server.admin import admin_router
from prism.server.completions import Completions, Endpoint, refusal_reason
from prism.server.errors import MAX_SHOWN_CHARS, ApiError, internal, invalid
from prism.server.front import Front
from prism.server.http import Edge, error_response
from prism.server.kinds import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, SCORE
from prism.server.pooled_requests import ClassifyRequest, EmbeddingsRequest, RerankRequest, ScoreRequest
from prism.server.public import public_router


def kinds() -> list[Endpoint]:
    """The endpoints that ask something of a model; those of completions with SGLang's request models."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

    return [
        Endpoint(CHAT, ChatCompletionRequest, "chatcmpl-", "messages", takes_ids=False),
        Endpoint(COMPLETIONS, CompletionRequest, "cmpl-", "prompt"),
        Endpoint(EMBEDDINGS, EmbeddingsRequest, "embd-", "input", streams=False),
        Endpoint(CLASSIFY, ClassifyRequest, "classify-", "input", streams=False),
        Endpoint(SCORE, ScoreRequest, "score-", "items", streams=False),
        Endpoint(RERANK, RerankRequest, "rerank-", "documents", takes_ids=False, streams=False),
    ]


class HotRoutes:
    """Sends the hot endpoints straight to their handlers, everything else through FastAPI."""

    def __init__(self, hot: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        self._hot, self._rest = hot, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._hot.get(scope["path"]) if scope["type"] == "http" else None
        if handler is None:
            await self._rest(scope, receive, send)
            return
        scope["prism_route"] = scope["path"]
        if scope["method"] == "POST":
            await handler(scope, receive, send)
        else:
            error = ApiError(405, "method_not_allowed", f"{scope['method']} is not allowed here; use POST.")
            response = error_response(error)
            response.headers["allow"] = "POST"
            await response(scope, receive, send)


def create_app(front: Front) -> ASGIApp:
    """Everything over ``front``; :meth:`Front.run` must run beside it."""
    served = kinds()
    api = create_api(front, served)
    hot = {kind.route: Completions(front, kind) for kind in served}

    def count(method: str, route: str, status: int) -> None:
        front.metrics.inc(names.HTTP, method=method, route=route, status=str(status))

    def refused(error: ApiError) -> None:
        reason = refusal_reason(error)
        if reason is not None:
            front.metrics.inc(names.REFUSED, reason=reason)

    app: ASGIApp = Edge(HotRoutes(hot, api), count, refused)
    origins = list(front.catalog.server.cors_origins)
    if origins:
        app = CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
    return app


def create_api(front: Front, served: list[Endpoint]) -> FastAPI:
    """The part that runs through FastAPI; its document describes all of it."""
    api = FastAPI(
        title="Prism",
        version=__version__,
        description="Many language models on few devices.",
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere and stay blank offline
        redoc_url=None,
    )
    api.include_router(public_router(front))
    api.include_router(admin_router(front))
    api.add_exception_handler(ApiError, _api_error)
    api.add_exception_handler(HTTPException, _http_error)
    api.add_exception_handler(RequestValidationError, _validation_error)
    api.add_exception_handler(Exception, _any_error)
    openapi.install(api, served)
    return api


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _any_error(request: Request, error: Exception) -> Response:
    return error_response(internal())  # the outermost layer logs it


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "method_not_allowed"}
    detail = f"{request.method} {request.url.path[:MAX_SHOWN_CHARS]}: {error.detail}. GET / says where things are."
    response = error_response(ApiError(error.status_code, codes.get(error.status_code, "http_error"), detail))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem: Any = error.errors()[0]
    param = ".".join(str(part) for part in problem["loc"][1:]) or None
    return error_response(invalid(f"{param or 'body'}: {problem['msg']}.", param))
