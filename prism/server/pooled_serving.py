"""The endpoints of models that answer with vectors or scores: what a request asks of the engine, and the answer's JSON.

Scores come from SGLang's own definitions (``serving_rerank``, ``serving_score``, ``serving_classify``), the shapes of
the answers from OpenAI (embeddings), Cohere and Jina (rerank), SGLang (score, classify).
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import numpy as np
import orjson
from numpy.typing import NDArray

from prism.core.specs import ModelKind
from prism.server.demand import Demand
from prism.server.errors import invalid
from prism.server.pooled_requests import ClassifyRequest, EmbeddingsRequest, rows_of
from prism.server.sglang_manager import Call, FrontManager
from prism.server.sglang_pooling import PooledInputs, PooledQueue

_FLOAT: Final = np.dtype("<f4")


class PooledServing:
    """What all of them share. Implements :class:`prism.server.sglang_serving.Serving`; nothing is streamed."""

    def __init__(self, manager: FrontManager, queue: PooledQueue, kind: ModelKind) -> None:
        self.manager, self.queue, self.kind = manager, queue, kind

    def demand(self, adapted: PooledInputs, exact: bool) -> Demand:
        return self.queue.demand(adapted, exact)

    async def submit(self, adapted: PooledInputs, call: Call) -> None:
        await self.queue.submit(adapted, call)

    def events(self, adapted: Any, request: Any) -> AsyncIterator[str]:
        raise invalid("This endpoint does not stream.", "stream")

    @property
    def labels(self) -> Sequence[str]:
        """Names of a classifier's labels."""
        named = self.manager.model_config.hf_config.id2label
        return [str(named[index]) for index in sorted(named)]

    async def vectors(self, adapted: PooledInputs) -> list[NDArray[np.float32]]:
        """One row of values per input."""
        assert adapted.prism_call is not None
        return [np.frombuffer(data, _FLOAT) for data in await self.queue.answers(adapted.prism_call)]


class EmbeddingsServing(PooledServing):
    """``/v1/embeddings``."""

    def convert(self, request: EmbeddingsRequest) -> PooledInputs:
        if request.dimensions is not None:
            self._check_dimensions(request.dimensions, request.model)
        return PooledInputs(rows_of(request.input, "input"), "input", request.dimensions)

    def _check_dimensions(self, wanted: int, model: str) -> None:
        config = self.manager.model_config
        if not config.is_matryoshka:
            raise invalid(
                f"{model!r} has vectors of {config.hidden_size} dimensions only: its configuration says nothing of "
                "shorter ones ('matryoshka_dimensions').",
                "dimensions",
            )
        choices = config.matryoshka_dimensions or range(1, config.hidden_size + 1)
        if wanted not in choices:
            shown = f"1 to {config.hidden_size}" if isinstance(choices, range) else ", ".join(map(str, choices))
            raise invalid(f"{model!r} has vectors of {shown} dimensions (got {wanted}).", "dimensions")

    async def answer(self, adapted: PooledInputs, request: EmbeddingsRequest) -> bytes:
        vectors = await self.vectors(adapted)
        as_text = request.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector}
            for index, vector in enumerate(vectors)
        ]
        return rendered({"object": "list", "data": data, "model": request.model, "usage": usage_of(adapted)})


class ClassifyServing(PooledServing):
    """``/v1/classify``: the probabilities of the labels."""

    def convert(self, request: ClassifyRequest) -> PooledInputs:
        return PooledInputs(rows_of(request.input, "input"), "input")

    async def answer(self, adapted: PooledInputs, request: ClassifyRequest) -> bytes:
        call, labels = adapted.prism_call, self.labels
        assert call is not None
        data = []
        for index, scores in enumerate(await self.vectors(adapted)):
            best = int(scores.argmax())
            label = labels[best] if best < len(labels) else f"LABEL_{best}"
            data.append({"index": index, "label": label, "probs": softmax(scores), "num_classes": len(scores)})
        return rendered(
            {
                "id": call.public_id,
                "object": "list",
                "created": int(call.arrival_s),
                "model": request.model,
                "data": data,
                "usage": usage_of(adapted),
            }
        )


def softmax(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """In float32, as torch does it."""
    powers = np.exp(scores - scores.max())
    found: NDArray[np.float32] = powers / powers.sum()
    return found


def usage_of(adapted: Any) -> dict[str, int]:
    """OpenAI's object for answers without tokens."""
    tokens = sum(stream.prompt_tokens for stream in adapted.prism_call.streams)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.tobytes()).decode()


def rendered(answer: dict[str, Any]) -> bytes:
    """Its JSON; arrays as lists."""
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
