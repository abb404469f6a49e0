"""The columns of a trace and what a valid value is. One home for both file formats.

========================  =================  ========================================================================
``arrival_s``             float64            seconds from the start, finite, >= 0, never decreasing
``model``                 string             empty when the source has one unnamed model
``prompt_tokens``         int32 or null      >= 1; null when the source does not say
``output_tokens``         int32 or null      >= 1; null when the source does not say
``session`` (optional)    string or null     requests of one conversation
``prefix_hash_ids`` (o.)  list<int64>, null  ids of the prompt's blocks of ``block_tokens`` tokens, from its start
========================  =================  ========================================================================

Other columns are allowed and ignored. Provenance stands beside the rows: in parquet as JSON under the schema metadata
key ``trace``, in JSONL as a first line ``{"trace": {...}}``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import pyarrow as pa

from prism.core.errors import InvalidValue

METADATA_KEY: Final = b"trace"
REQUIRED: Final = ("arrival_s", "model", "prompt_tokens", "output_tokens")
OPTIONAL: Final = ("session", "prefix_hash_ids")
DEFAULT_BLOCK_TOKENS: Final = 512
MOST_TOKENS: Final = 2**31 - 1

ARROW_SCHEMA: Final[Any] = pa.schema(
    [
        pa.field("arrival_s", pa.float64(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("session", pa.string()),
        pa.field("prefix_hash_ids", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What is known of a whole trace. ``provenance`` is free JSON: where it came from and what was done to it."""

    provenance: dict[str, Any] = field(default_factory=dict)
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    """Tokens of one block of ``prefix_hash_ids``."""

    def with_step(self, step: str, **settings: object) -> TraceInfo:
        """The same with one more entry in ``provenance["steps"]``."""
        steps = [*self.provenance.get("steps", []), {"step": step, **settings}]
        return TraceInfo({**self.provenance, "steps": steps}, self.block_tokens)


def encode_info(info: TraceInfo) -> bytes:
    """``info`` as the JSON that stands in a file."""
    return msgspec.json.encode({**info.provenance, "block_tokens": info.block_tokens})


def decode_info(data: bytes, where: str) -> TraceInfo:
    """The inverse of :func:`encode_info`; ``where`` names the file in errors."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as exc:
        raise InvalidValue("trace", data[:80], f"the provenance is not a JSON object: {exc}", where=where) from exc
    block_tokens = found.pop("block_tokens", DEFAULT_BLOCK_TOKENS)
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidValue("block_tokens", block_tokens, "must be a whole number of at least 1", where=where)
    return TraceInfo(found, block_tokens)
