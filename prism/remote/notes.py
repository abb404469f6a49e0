"""What rank 0 of an engine tells its other ranks about layers in other engines (MessagePack, as all messages here)."""

from __future__ import annotations

import msgspec

from prism.remote.messages import FetchKv, RunPieces, TensorHead


class _Note(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


class DoForeign(_Note, frozen=True, kw_only=True):
    """Do this for the ``leader``-th engine that asked; the message's tensors follow."""

    leader: int
    slots: int
    """Of the leader."""
    work: RunPieces | FetchKv


class LeadersGone(_Note, frozen=True, kw_only=True):
    """What is kept for these goes."""

    leaders: list[int]


class RunPart(_Note, frozen=True, kw_only=True):
    """Run a part of a prefill at a stop of the route that is here."""

    stop: int
    part: int


class PartCame(_Note, frozen=True, kw_only=True):
    """Its state behind a stop at a peer follows."""

    part: int


class Over(_Note, frozen=True, kw_only=True):
    """What rank 0 did is done, with these numbers; tensors may follow. ``lost``: why it could not be."""

    numbers: list[int] = []
    lost: str | None = None


Note = DoForeign | LeadersGone | RunPart | PartCame | Over


class NoteEnvelope(msgspec.Struct, frozen=True):
    """A note and what follows it."""

    note: Note
    tensors: list[TensorHead] = []


encode_note = msgspec.msgpack.Encoder().encode
note_decoder: msgspec.msgpack.Decoder[NoteEnvelope] = msgspec.msgpack.Decoder(NoteEnvelope)
