"""SGLang's incremental detokenizer, fed from our token logs.

Ids to decode are the end of the prompt and the tokens of the log, never what an engine says: so a request that several
engines ran one after the other reads like one answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, LimitedCapacityDict
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from prism.engine.sglang_codec import Extra
from prism.server.stream import RequestStream
from prism.server.token_log import Fresh

MAX_STATES: Final = 1 << 20

_extra = msgspec.msgpack.Decoder(Extra)
_SLICED: Final = ("output_val", "output_idx", "output_top_val", "output_top_idx", "output_ids_val", "output_ids_idx")
_PROMPT: Final = ("input_val", "input_idx", "input_top_val", "input_top_idx", "input_ids_val", "input_ids_idx")
_NAMES: Final = {
    "val": "token_logprobs_val",
    "idx": "token_logprobs_idx",
    "top_val": "top_logprobs_val",
    "top_idx": "top_logprobs_idx",
    "ids_val": "token_ids_logprobs_val",
    "ids_idx": "token_ids_logprobs_idx",
}


@dataclass(slots=True)
class _Batch:
    """The columns of SGLang's ``BatchTokenIDOutput`` that its decoder reads."""

    rids: list[str] = field(default_factory=list)
    decoded_texts: list[str] = field(default_factory=list)
    decode_ids: list[list[int]] = field(default_factory=list)
    read_offsets: list[int] = field(default_factory=list)
    finished_reasons: list[dict[str, object] | None] = field(default_factory=list)
    skip_special_tokens: list[bool] = field(default_factory=list)
    spaces_between_special_tokens: list[bool] = field(default_factory=list)
    no_stop_trim: list[bool] = field(default_factory=list)


class Detokenizer(DetokenizerManager):  # type: ignore[misc]
    """The :class:`prism.server.stream.Sink` of one model."""

    def __init__(self, manager: TokenizerManager) -> None:
        args = manager.server_args
        self._manager = manager
        self.tokenizer = manager.tokenizer
        self.vocab_size = len(self.tokenizer)
        self.decode_status = LimitedCapacityDict(capacity=MAX_STATES)
        self.disable_tokenizer_batch_decode = args.disable_tokenizer_batch_decode
        self.is_tool_call_parser_gpt_oss = args.tool_call_parser == "gpt-oss"

    def deliver(self, batch: Sequence[tuple[RequestStream, Fresh, bytes]]) -> None:
        columns = _Batch()
        for stream, fresh, _ in batch:
            started = stream.id in self.decode_status
            columns.rids.append(stream.id)
            columns.decoded_texts.append("")
            columns.decode_ids.append(fresh.token_ids if started else stream.prompt_tail + fresh.token_ids)
            columns.read_offsets.append(len(stream.prompt_tail))
            columns.finished_reasons.append(fresh.finish)
            skip, spaces, no_trim = stream.decoding
            columns.skip_special_tokens.append(skip)
            columns.spaces_between_special_tokens.append(spaces)
            columns.no_stop_trim.append(no_trim)
        texts = self._decode_batch_token_id_output(columns)
        for (stream, fresh, extra), text in zip(batch, texts, strict=True):
            stream.text += text
            if extra:
                self._extra(stream, fresh, _extra.decode(extra))

    def forget(self, stream: RequestStream) -> None:
        self.decode_status.pop(stream.id, None)

    def _extra(self, stream: RequestStream, fresh: Fresh, extra: Extra) -> None:
        stream.reasoning_tokens = max(stream.reasoning_tokens, extra.reasoning_tokens)
        kept = stream.logprobs
        if kept is None:
            return
        first = not kept.state.output_token_logprobs_val
        columns: dict[str, Any] = {
            "input_" + _NAMES[name.removeprefix("input_")]: [(getattr(extra, name) or []) if first else []]
            for name in _PROMPT
        }
        for name in _SLICED:
            values = getattr(extra, name) or []
            columns["output_" + _NAMES[name.removeprefix("output_")]] = [values[fresh.skipped :]]
        row = SimpleNamespace(**columns)
        self._manager.convert_logprob_style({}, kept.state, kept.top, kept.token_ids, True, row, 0)
