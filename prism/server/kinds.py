"""Which endpoints a model answers at, by what it answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from prism.core.specs import ModelKind
from prism.server.errors import ApiError

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
CLASSIFY: Final = "/v1/classify"
RERANK: Final = "/v1/rerank"
SCORE: Final = "/v1/score"

ROUTES: Final[Mapping[ModelKind, tuple[str, ...]]] = {
    ModelKind.GENERATE: (CHAT, COMPLETIONS, SCORE, RERANK),
    ModelKind.EMBED: (EMBEDDINGS,),
    ModelKind.CLASSIFY: (CLASSIFY, SCORE, RERANK),
    ModelKind.RERANK: (RERANK,),
}
"""A model that generates reranks if its template is a reranker's, a classifier if it has one label."""

_ANSWERS: Final[Mapping[ModelKind, str]] = {
    ModelKind.GENERATE: "generates text",
    ModelKind.EMBED: "embeds texts: it answers with vectors and generates nothing",
    ModelKind.CLASSIFY: "classifies texts: it answers with a score per label and generates nothing",
    ModelKind.RERANK: "scores pairs of texts and generates nothing",
}


def served_at(kind: ModelKind) -> tuple[str, ...]:
    """Where every model of this kind answers."""
    return tuple(route for route in ROUTES[kind] if route != RERANK or kind is ModelKind.RERANK)


def wrong_kind(model: str, kind: ModelKind, route: str, others: Sequence[str]) -> ApiError:
    """400: ``model`` has no answers for ``route``. ``others``: models that do."""
    there = ", ".join(served_at(kind))
    message = f"The model {model!r} {_ANSWERS[kind]}. It is served at {there}, not at {route}."
    if others:
        message += f" Models for {route}: {', '.join(map(repr, others))}."
    return ApiError(400, "unsupported_model_kind", message, param="model")
