"""The OpenAPI document: FastAPI's own routes, and the endpoints that do not run through FastAPI."""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI
from pydantic import BaseModel

from prism.server.completions import Endpoint
from prism.server.requests import MAX_CHOICES, MAX_TOP_LOGPROBS, UNSUPPORTED

_REF: Final = "#/components/schemas/{model}"

ERROR_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_BOUNDS: Final = {"n": (1, MAX_CHOICES), "top_logprobs": (0, MAX_TOP_LOGPROBS)}


def install(app: FastAPI, kinds: list[Endpoint]) -> None:
    """Makes ``app.openapi()`` describe ``kinds`` too, with every error as OpenAI's object."""
    original = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = original()
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = ERROR_SCHEMA
            for kind in kinds:
                document["paths"][kind.route] = {"post": _operation(kind, schemas)}
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    operation["responses"].setdefault("default", _error("An error"))
            schemas.pop("HTTPValidationError", None)
            schemas.pop("ValidationError", None)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(kind: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = request_schema(kind.request)
    schemas |= schema.pop("$defs", {})
    schemas[kind.request.__name__] = schema
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if kind.streams:
        content["text/event-stream"] = {}
    return {
        "tags": ["openai"],
        "summary": kind.route,
        "operationId": kind.route.strip("/").replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(model=kind.request.__name__)}}},
        },
        "responses": {
            "200": {
                "description": "The answer, or its stream" if kind.streams else "The answer",
                "content": content,
            }
        },
    }


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What this server takes of SGLang's request model."""
    schema = model.model_json_schema(ref_template=_REF)
    properties = schema["properties"]
    for name in UNSUPPORTED:
        properties.pop(name, None)
    for name, (low, high) in _BOUNDS.items():
        if name in properties:
            properties[name] |= {"minimum": low, "maximum": high}
    schema["required"] = sorted({*schema.get("required", ()), "model"})
    schema["additionalProperties"] = False
    return schema


def _error(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}}
