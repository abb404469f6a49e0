"""What a fake engine must know of a request, read from ``Submission.payload`` without importing SGLang."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from prism.core.errors import InvalidValue

_TAG: Final = "TokenizedGenerateReqInput"
_INPUT_IDS, _SAMPLING, _LOGPROB, _TOP = 4, 8, 9, 11
"""Positions in SGLang's array coding of the request (tested against :mod:`prism.engine.sglang_codec`)."""
_MEDIA_TAG: Final = "WithMedia"
"""Images, and the request inside (:class:`prism.engine.sglang_codec.WithMedia`)."""
_POOLED_TAG: Final = "TokenizedEmbeddingReqInput"
_DIMENSIONS: Final = 8
"""Of the made-up vectors."""


@dataclass(frozen=True, slots=True)
class FakePayload:
    """The part of a request that shapes made-up output."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    top_logprobs: int | None
    """None: no log-probabilities are wanted."""
    pooled: bool = False
    """A vector is wanted, and no tokens."""


def read_payload(payload: bytes) -> FakePayload:
    """Raises :class:`InvalidValue` when ``payload`` is not a request."""
    try:
        fields: list[Any] = msgspec.msgpack.decode(payload)
        if fields[0] == _MEDIA_TAG:
            fields = msgspec.msgpack.decode(fields[1])
        if fields[0] not in (_TAG, _POOLED_TAG):
            raise ValueError(f"tag {fields[0]!r}")
        ids = array("q")
        ids.frombytes(fields[_INPUT_IDS][1])
        if fields[0] == _POOLED_TAG:
            return FakePayload(tuple(ids), 0, None, pooled=True)
        limit = fields[_SAMPLING].get("max_new_tokens")
        top = fields[_TOP] if fields[_LOGPROB] else None
        return FakePayload(tuple(ids), 128 if limit is None else int(limit), top)
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise InvalidValue("payload", f"{len(payload)} bytes", f"not a tokenized request: {error}") from None


def fake_tokens(prompt_ids: tuple[int, ...], start: int, count: int, vocab: range) -> list[int]:
    """Tokens ``start`` to ``start + count`` of the one answer every fake engine gives to this prompt, whichever
    attempt asks: so a resumed request can be told from one that lost or repeated a token."""
    seed = (sum(prompt_ids) * 31 + len(prompt_ids) * 7) % len(vocab)
    return [vocab[(seed + 3 * index) % len(vocab)] for index in range(start, start + count)]


def fake_extra(tokens: list[int], top: int | None) -> bytes:
    """``TokenItem.extra`` with a log-probability of -0.5 for every token and ``top`` alternatives."""
    if top is None:
        return b""
    extra: dict[str, Any] = {"output_val": [-0.5] * len(tokens), "output_idx": tokens}
    if top:
        extra["output_top_val"] = [[-0.5 - rank for rank in range(top)] for _ in tokens]
        extra["output_top_idx"] = [[token + rank for rank in range(top)] for token in tokens]
    return msgspec.msgpack.encode(extra)


def fake_vector(prompt_ids: tuple[int, ...]) -> bytes:
    """``TokenItem.extra`` with the one vector that every fake engine has for this input."""
    values = array("f", (float((sum(prompt_ids) * (i + 3) + len(prompt_ids)) % 251) for i in range(_DIMENSIONS)))
    return msgspec.msgpack.encode({"vector": values.tobytes()})
