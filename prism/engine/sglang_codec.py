"""SGLang's own request and output objects on Prism's wires. The only place outside the engine worker that knows them.

Front door to engine: :func:`encode_request` / :func:`decode_request` (``Submission.payload``). Engine to front door:
:func:`pack_extra` fills ``TokenItem.extra``; :class:`OutputBuilder` rebuilds the ``BatchTokenIDOutput`` that SGLang's
detokenizer and tokenizer manager take. Nothing is pickled in either direction.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    BatchTokenIDOutput,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)

from prism.core.errors import InvalidValue
from prism.engine.sglang_media import pack_media, unpack_media
from prism.wire.messages import TokenItem

Tokenized: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
"""A request for text, or for a vector (embeddings, scores of a classifier or cross-encoder)."""


class WithMedia(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request with images: the request without them, and they (:mod:`prism.engine.sglang_media`)."""

    request: bytes
    media: bytes


_encoder = msgspec.msgpack.Encoder(enc_hook=io_struct.enc_hook)
_decoder: msgspec.msgpack.Decoder[Tokenized] = msgspec.msgpack.Decoder(Tokenized, dec_hook=io_struct.dec_hook)
_media_decoder = msgspec.msgpack.Decoder(WithMedia)
_MEDIA_TAG: Final = msgspec.msgpack.encode("WithMedia")

PREFIX_TOKENS: Final = 5
"""Prompt tokens the detokenizer sees before the first output token (SGLang's incremental detokenization offset)."""


def encode_request(request: Tokenized) -> bytes:
    """The request's bytes. Raises :class:`InvalidValue` for what only a pickle could carry."""
    request.time_stats = None
    media, request.mm_inputs = request.mm_inputs, None
    if _has_pickle(request):
        raise InvalidValue("messages", "audio or video", "this server takes texts and images only")
    plain = _encoder.encode(request)
    if media is None:
        return plain
    request.mm_inputs = media
    return _encoder.encode(WithMedia(plain, pack_media(media)))


def decode_request(payload: bytes) -> Tokenized:
    """The request in ``payload``. Raises :class:`InvalidValue` on anything malformed or pickled."""
    media = None
    try:
        if payload[1 : 1 + len(_MEDIA_TAG)] == _MEDIA_TAG:
            found = _media_decoder.decode(payload)
            payload, media = found.request, found.media
        request = _decoder.decode(payload)
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError, ValueError) as error:
        raise InvalidValue("payload", f"{len(payload)} bytes", f"not a tokenized request: {error}") from None
    if _has_pickle(request):
        raise InvalidValue("payload", "pickled data", "nothing pickled is accepted")
    request.time_stats = None
    if media is not None:
        request.mm_inputs = unpack_media(media)
    return request


def _has_pickle(request: Tokenized) -> bool:
    return request.mm_inputs is not None or getattr(request, "mm_data_mooncake", None) is not None


class Extra(msgspec.Struct, frozen=True, omit_defaults=True, array_like=False):
    """What a :class:`TokenItem` carries beyond tokens. Log-probabilities are as in ``BatchTokenIDOutput``, of this
    item's tokens only; the prompt's come once, with the first item of the first attempt."""

    prompt_tokens: int = 0
    reasoning_tokens: int = 0
    retractions: int = 0
    input_val: list[Any] | None = None
    input_idx: list[Any] | None = None
    input_top_val: list[Any] | None = None
    input_top_idx: list[Any] | None = None
    input_ids_val: list[Any] | None = None
    input_ids_idx: list[Any] | None = None
    output_val: list[Any] | None = None
    output_idx: list[Any] | None = None
    output_top_val: list[Any] | None = None
    output_top_idx: list[Any] | None = None
    output_ids_val: list[Any] | None = None
    output_ids_idx: list[Any] | None = None
    vector: bytes = b""
    """The answer of a model that does not generate, one value or many: float32, least significant byte first."""


_LOGPROB_FIELDS: Final = {
    "input_val": "input_token_logprobs_val",
    "input_idx": "input_token_logprobs_idx",
    "input_top_val": "input_top_logprobs_val",
    "input_top_idx": "input_top_logprobs_idx",
    "input_ids_val": "input_token_ids_logprobs_val",
    "input_ids_idx": "input_token_ids_logprobs_idx",
    "output_val": "output_token_logprobs_val",
    "output_idx": "output_token_logprobs_idx",
    "output_top_val": "output_top_logprobs_val",
    "output_top_idx": "output_top_logprobs_idx",
    "output_ids_val": "output_token_ids_logprobs_val",
    "output_ids_idx": "output_token_ids_logprobs_idx",
}
_extra_encoder = msgspec.msgpack.Encoder(enc_hook=io_struct.enc_hook)
_extra_decoder = msgspec.msgpack.Decoder(Extra)


def pack_extra(batch: BatchTokenIDOutput, row: int) -> bytes:
    """``TokenItem.extra`` for row ``row`` of the engine's output; empty when there is nothing but tokens to say."""
    values: dict[str, Any] = {}
    for short, name in _LOGPROB_FIELDS.items():
        column = getattr(batch, name)
        if column is not None and column[row] is not None and len(column[row]):
            values[short] = column[row]
    if batch.reasoning_tokens[row]:
        values["reasoning_tokens"] = batch.reasoning_tokens[row]
    if batch.retraction_counts and batch.retraction_counts[row]:
        values["retractions"] = batch.retraction_counts[row]
    return _extra_encoder.encode(Extra(**values)) if values else b""


def pack_vector(values: Any) -> bytes:
    """``TokenItem.extra`` with one row of SGLang's ``BatchEmbeddingOutput.embeddings`` (a number or a list of them).
    Raises :class:`TypeError` for a row that is neither: only what the front door never asks for answers so."""
    numbers = array("f", [values] if isinstance(values, int | float) else values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return _extra_encoder.encode(Extra(vector=numbers.tobytes()))


def unpack_vector(extra: bytes) -> bytes:
    """The values of :func:`pack_vector`, as they lie there; none in an ``extra`` without."""
    return _extra_decoder.decode(extra).vector if extra else b""


@dataclass(slots=True)
class _OutputStream:
    """What the front door must remember of a request between its outputs."""

    prefix: array[int]
    prompt_tokens: int
    return_logprob: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    received: int = 0
    reasoning_tokens: int = 0
    started: bool = False
    cached_tokens: int | None = None


@dataclass(slots=True)
class OutputBuilder:
    """Turns :class:`TokenItem` s into SGLang's ``BatchTokenIDOutput``, one builder per model at a front door.

    The caller has already dropped items of superseded attempts and duplicate tokens; each item continues where the last
    one of its request ended. Feed the result to ``DetokenizerManager.handle_batch_token_id_out`` and that to
    ``TokenizerManager._handle_batch_output``.
    """

    _streams: dict[str, _OutputStream] = field(default_factory=dict)

    def add(self, request: TokenizedGenerateReqInput) -> None:
        """A request was submitted. ``request.rid`` is the id its items carry."""
        ids = request.input_ids
        params = request.sampling_params
        self._streams[request.rid] = _OutputStream(
            prefix=array("q", ids[-PREFIX_TOKENS:]),
            prompt_tokens=len(ids),
            return_logprob=bool(request.return_logprob),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            no_stop_trim=params.no_stop_trim,
        )

    def forget(self, rid: str) -> None:
        """The request ended without a finishing item (cancelled, failed). Unknown ids are ignored."""
        self._streams.pop(rid, None)

    def build(self, items: Iterable[TokenItem]) -> BatchTokenIDOutput | None:
        """One output for all ``items`` (each request at most once). None when none of them is known here."""
        rows = [(item, self._streams[item.id]) for item in items if item.id in self._streams]
        if not rows:
            return None
        output = _assemble(rows)
        for item, stream in rows:
            stream.started = True
            if item.finish is not None:
                del self._streams[item.id]
        return output


def _assemble(rows: Sequence[tuple[TokenItem, _OutputStream]]) -> BatchTokenIDOutput:
    extras = [_extra_decoder.decode(item.extra) if item.extra else Extra() for item, _ in rows]
    for (item, stream), extra in zip(rows, extras, strict=True):
        stream.received += len(item.token_ids)
        stream.reasoning_tokens = max(stream.reasoning_tokens, extra.reasoning_tokens)
        if stream.cached_tokens is None:
            stream.cached_tokens = item.cached_tokens
    streams = [stream for _, stream in rows]
    ids = [array("q", item.token_ids) for item, _ in rows]
    logprobs: dict[str, Any] = dict.fromkeys(_LOGPROB_FIELDS.values())
    if any(stream.return_logprob for stream in streams):
        logprobs = {name: [getattr(x, short) or [] for x in extras] for short, name in _LOGPROB_FIELDS.items()}
    return BatchTokenIDOutput(
        rids=[item.id for item, _ in rows],
        http_worker_ipcs=[None] * len(rows),
        finished_reasons=[item.finish for item, _ in rows],
        decoded_texts=[""] * len(rows),
        decode_ids=[new if s.started else s.prefix + new for s, new in zip(streams, ids, strict=True)],
        read_offsets=[len(s.prefix) for s in streams],
        output_ids=ids,
        skip_special_tokens=[s.skip_special_tokens for s in streams],
        spaces_between_special_tokens=[s.spaces_between_special_tokens for s in streams],
        no_stop_trim=[s.no_stop_trim for s in streams],
        prompt_tokens=[s.prompt_tokens for s in streams],
        reasoning_tokens=[s.reasoning_tokens for s in streams],
        completion_tokens=[s.received for s in streams],
        cached_tokens=[s.cached_tokens or 0 for s in streams],
        retraction_counts=[x.retractions for x in extras],
        output_token_entropy_val=None,
        output_token_sampling_mask=None,
        output_token_sampling_logprobs=None,
        output_hidden_states=None,
        routed_experts=None,
        indexer_topk=None,
        placeholder_tokens_idx=None,
        placeholder_tokens_val=None,
        **logprobs,
    )
