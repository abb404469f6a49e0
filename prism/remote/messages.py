"""Messages between an engine that leads requests and a peer that runs layers for it (MessagePack, nothing pickled).

A model's pieces are numbered: 0 the embedding, 1..L the decoder layers, L+1 the last norm and the head. Slots and rows
are the leader's: the peer keeps KV for them in memory of its own and frees nothing by itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

VERSION: Final = 4
"""Of all messages here together; both sides must speak the same."""


class _Remote(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


class PeerHello(_Remote, frozen=True, kw_only=True):
    """The leader's first message: who it is, and what the peer must have."""

    version: int
    engine: str
    model: str
    """Names the weights and how they are split and typed."""
    slots: int
    """Slot numbers are below it."""


class PeerWelcome(_Remote, frozen=True, kw_only=True):
    """The peer's answer: what can be asked for."""

    version: int
    engine: str
    pieces: list[int]


class MeasureLink(_Remote, frozen=True, kw_only=True):
    """Send as many bytes: how fast KV would come is seen before any does. Answered by :class:`Measured`."""

    batch: int
    nbytes: int


class Measured(_Remote, frozen=True, kw_only=True):
    """The answer: a tensor of bytes that mean nothing, none for 0 of them."""

    batch: int


class Leading(_Remote, frozen=True, kw_only=True):
    """Whether the leader's route leads over this peer now; otherwise it is one that it would fall back to. Without
    answer."""

    now: bool


class RunPieces(_Remote, frozen=True, kw_only=True):
    """Run pieces [first, end) on a batch. Without piece 0 the hidden states, and the residual behind the first layer,
    come as tensors ``[tokens, hidden]``. Lists with an entry per request: ``rows``, ``seq_lens`` (with the new tokens),
    and, for a prefill, ``prefix_lens`` and ``extend_lens``; per new token: ``out_slots``, ``positions``, ``token_ids``,
    and, for models whose positions have three parts, three lists in ``mrope``. What stands for an image has any id.

    ``table_slots`` are the entries of the leader's request table, at ``table_rows`` and ``table_positions``, that are
    others than what it sent before: those of new tokens, and of tokens that turned out to be in the prefix tree."""

    batch: int
    first: int
    end: int
    decode: bool
    rows: list[int]
    seq_lens: list[int]
    out_slots: list[int]
    positions: list[int]
    token_ids: list[int]
    table_rows: list[int]
    table_positions: list[int]
    table_slots: list[int]
    prefix_lens: list[int] = []
    extend_lens: list[int] = []
    mrope: list[list[int]] = []
    since: int | None = None
    """Pieces [since, first) ran at the leader in the peer's stead; their K and V of the new tokens are further tensors,
    ``[layers, tokens, heads, dim]``."""


class RunRest(_Remote, frozen=True, kw_only=True):
    """While what was asked with the number ``batch`` waited for the peer, the leader has run it up to ``first``: the
    tensors are the state there, and K and V of all that it has run. Dropped where the peer has begun; what it answers
    then is the same. Without an answer of its own."""

    batch: int
    first: int


class HiddenStates(_Remote, frozen=True, kw_only=True):
    """The answer: hidden states and residual as tensors."""

    batch: int


class FetchKv(_Remote, frozen=True, kw_only=True):
    """The KV that the peer has of ``slots`` in layers [first_layer, end_layer). Answered by :class:`KvRows`."""

    batch: int
    first_layer: int
    end_layer: int
    slots: list[int]


class KvRows(_Remote, frozen=True, kw_only=True):
    """K and V as tensors ``[layers, slots, heads, dim]``."""

    batch: int


class Refused(_Remote, frozen=True, kw_only=True):
    """What was asked was not done, and why; the leader goes on without this peer."""

    batch: int
    reason: str


Message = (
    PeerHello
    | PeerWelcome
    | MeasureLink
    | Measured
    | Leading
    | RunPieces
    | RunRest
    | HiddenStates
    | FetchKv
    | KvRows
    | Refused
)


class TensorHead(msgspec.Struct, frozen=True):
    """How one tensor's bytes, which follow the message in order, are to be read."""

    dtype: str
    shape: list[int]
    nbytes: int


class Envelope(msgspec.Struct, frozen=True):
    """A message and what follows it."""

    message: Message
    tensors: list[TensorHead] = []


encode_envelope = msgspec.msgpack.Encoder().encode
envelope_decoder: msgspec.msgpack.Decoder[Envelope] = msgspec.msgpack.Decoder(Envelope)
