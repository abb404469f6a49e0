"""SGLang's tokenizer manager over Prism's queues: its validation and tokenisation in front, our streams behind.

Everything the OpenAI layer reads of a tokenizer manager is SGLang's own; only what would open sockets is replaced, and
:meth:`FrontManager.generate_request`, whose contract is SGLang's (an asynchronous generator of ``{"text", "output_ids",
"meta_info"}``, cumulative when streaming).
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import ReqState, TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs

from prism.config.units import format_size
from prism.core.ids import ModelName
from prism.engine.sglang_codec import PREFIX_TOKENS, encode_request
from prism.server.broker import Broker
from prism.server.errors import context_length_exceeded, invalid
from prism.server.objectives import Objectives
from prism.server.sglang_detok import Detokenizer
from prism.server.stream import RequestStream, submission_of
from prism.server.token_text import Offsets, TokenLogprob, token_bytes

PIECE_CHARS: Final = 4
_NO_ANSWER: Final = {"type": "length", "length": 0}
LONG_TEXT_CHARS: Final = 20_000
"""Longer texts (of a request, all prompts together) are tokenised on a thread (the tokenizer releases the interpreter
lock), so that others go on."""


class _NoState:
    """Stands where SGLang keeps a request's state; only its clock is ever asked for."""

    class time_stats:
        @staticmethod
        def set_tokenize_finish_time() -> None: ...


class _NoStates(dict[str, Any]):
    def __missing__(self, key: str) -> type[_NoState]:
        return _NoState


@dataclass(slots=True)
class Call:
    """One HTTP request: where it stands between conversion and the end of its response."""

    request_id: str
    """Prefix of the ids of its choices; ``x-request-id``."""
    public_id: str
    """``id`` of the response object."""
    objectives: Objectives
    arrival_s: float
    param: str
    """The field that holds the prompt, for errors."""
    grammar: str | None = None
    """The field that says what the answer looks like, for errors."""
    streams: list[RequestStream] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: bool = False
    echo_chars: Sequence[int] = ()
    """Lengths of the prompts' texts when they are repeated before the answers."""
    prompt_only: bool = False
    """The client asked for no answer, only for its prompt: the one token that engines make is not shown."""
    max_prepared_bytes: int = 0
    """Most that its images may have once they are prepared."""
    piecewise: bool = False
    """SGLang's streaming parsers (tools, reasoning) read the text: it is handed on in pieces (:func:`_pieces`)."""
    adapter: str | None = None
    """The LoRA adapter it is for (:attr:`prism.wire.adapters.AdapterRef.id`)."""


class FrontManager(TokenizerManager):  # type: ignore[misc]
    """One per model."""

    def __init__(self, model: ModelName, server_args: ServerArgs, port_args: PortArgs, broker: Broker) -> None:
        self.prism_model, self.broker = model, broker
        super().__init__(server_args, port_args)
        self.rid_to_state = _NoStates()
        self.detokenizer = Detokenizer(self)
        self.vocab_size: int = self.model_config.vocab_size
        self._preparing = threading.Lock()

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        self.tokenizer_ipc_name = None
        self.load_snapshot_reader = None

    def auto_create_handle_loop(self) -> None:
        return None

    def _dispatch_to_scheduler(self, obj: Any) -> None:
        raise AssertionError(f"{type(obj).__name__} has no way to an engine: requests go through Broker.submit")

    # --- in ---

    async def submit(self, obj: GenerateReqInput, call: Call) -> None:
        """Tokenises, checks and queues all choices of ``obj``. Raises :class:`ApiError` or SGLang's ``ValueError``."""
        self.check_ids(obj.input_ids, call.param)
        obj.normalize_batch_and_arguments()
        obj.prism_call = call
        parts = [obj] if obj.is_single else [obj[i] for i in range(obj.batch_size)]
        long = sum(len(part.text) for part in parts if isinstance(part.text, str)) > LONG_TEXT_CHARS
        tokenized = [await self._tokenize(part, call, long) for part in parts]
        copies = getattr(obj, "parallel_sample_num", 1)
        for row, request in enumerate(tokenized):
            for choice in range(copies):
                stream = self._stream(request, call, len(call.streams), bool(obj.stream))
                call.streams.append(stream)
                if request.return_logprob:
                    stream.logprobs = self._accumulators(
                        stream, request, call.echo_chars[row] if call.echo_chars else 0
                    )
                await self._queue(stream, request, call, choice)
        call.submitted = True

    async def _tokenize(self, part: GenerateReqInput, call: Call, long: bool) -> TokenizedGenerateReqInput:
        part.prism_call = call
        if part.video_data or part.audio_data or (part.image_data and not self.takes_images):
            raise invalid("This model takes no such content.", call.param, "unsupported_content")
        if part.image_data:
            return await asyncio.to_thread(self._prepare_images, part, call)
        if long and isinstance(part.text, str):
            part.input_ids = await asyncio.to_thread(lambda: self.tokenizer(part.text)["input_ids"])
            part.text = None
        return await self._tokenize_one_request(part)

    @property
    def takes_images(self) -> bool:
        """SGLang has a processor for this model's images, and the model's folder has what it needs."""
        return self.mm_processor is not None and bool(self.model_config.is_image_understandable_model)

    def _prepare_images(self, part: GenerateReqInput, call: Call) -> TokenizedGenerateReqInput:
        """On a thread, in a loop of its own: SGLang's processors compute for a while between their awaits. One after
        the other, since the libraries below are not made for more."""
        with self._preparing:
            request = asyncio.run(self._tokenize_one_request(part))
        items = request.mm_inputs.mm_items if request.mm_inputs is not None else ()
        sizes = [item.feature.nbytes for item in items if item.feature is not None]
        if sum(sizes) > call.max_prepared_bytes:
            shown, limit = format_size(sum(sizes)), format_size(call.max_prepared_bytes)
            raise invalid(f"The images are {shown} as the model reads them; {limit} are allowed.", call.param)
        return request

    def _validate_one_request(self, obj: GenerateReqInput, input_ids: list[int]) -> None:
        wanted = obj.sampling_params.get("max_new_tokens")
        if len(input_ids) + (wanted or 1) > self.context_len:
            raise context_length_exceeded(self.context_len, len(input_ids), wanted, obj.prism_call.param)
        super()._validate_one_request(obj, input_ids)

    def check_ids(self, ids: Any, param: str) -> None:
        """Raises :class:`ApiError` (400) for ids, or lists of them, that the model does not have."""
        for row in ids if ids and isinstance(ids[0], list) else [ids or []]:
            if row and (min(row) < 0 or max(row) >= self.vocab_size):
                raise invalid(f"Token ids must be between 0 and {self.vocab_size - 1}.", param)

    def _stream(self, request: TokenizedGenerateReqInput, call: Call, index: int, streaming: bool) -> RequestStream:
        params, ids = request.sampling_params, request.input_ids
        limit = self.context_len - len(ids)
        return RequestStream(
            id=f"{call.request_id}-{index:03d}",
            model=self.prism_model,
            sink=self.detokenizer,
            wake=call.wake,
            streaming=streaming,
            prompt_tokens=len(ids),
            prompt_tail=list(ids[-PREFIX_TOKENS:]),
            max_new_tokens=limit if params.max_new_tokens is None else min(limit, params.max_new_tokens),
            arrival_s=call.arrival_s,
            stop=() if params.no_stop_trim else tuple(params.stop_strs or ()),
            decoding=(params.skip_special_tokens, params.spaces_between_special_tokens, params.no_stop_trim),
            grammar=call.grammar,
        )

    async def _queue(self, stream: RequestStream, request: TokenizedGenerateReqInput, call: Call, choice: int) -> None:
        request = copy.copy(request)
        request.rid, request.lora_id = stream.id, call.adapter
        if choice and request.sampling_params.sampling_seed is not None:
            # The choices of one prompt differ, and each is reproducible.
            request.sampling_params = copy.copy(request.sampling_params)
            request.sampling_params.sampling_seed += choice
        payload = encode_request(request)
        await self.broker.submit(stream, submission_of(stream, self.broker.inbox.address, call.objectives, payload))

    # --- out ---

    async def generate_request(self, obj: GenerateReqInput, request: Any = None) -> AsyncIterator[Any]:
        """SGLang's contract: one dictionary per step when streaming, one (or a list, for several choices) at the end
        otherwise. Requests that the reader leaves behind are cancelled."""
        call: Call = obj.prism_call
        try:
            if not call.submitted:
                await self.submit(obj, call)
            if obj.stream:
                async for output in self._steps(call):
                    yield output
            else:
                await self.all_ended(call)
                outputs = [self._output(stream, call) for stream in call.streams]
                yield outputs[0] if len(outputs) == 1 else outputs
        finally:
            self.abandon(call)

    def abandon(self, call: Call) -> None:
        """The response is over: what is not finished is cancelled. Idempotent."""
        for stream in call.streams:
            self.broker.release(stream, "the client went away")

    async def all_ended(self, call: Call) -> None:
        """Raises the :class:`ApiError` of the first choice that failed."""
        while True:
            for stream in call.streams:
                if stream.error is not None:
                    raise stream.error
            if all(stream.finished for stream in call.streams):
                return
            await call.wake.wait()
            call.wake.clear()

    async def _steps(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        running = list(call.streams)
        several = len(running) > 1
        while running:
            await call.wake.wait()
            call.wake.clear()
            for stream in list(running):
                if stream.error is not None:
                    raise stream.error
                if not stream.dirty:
                    continue
                stream.dirty = False
                if stream.finished:
                    running.remove(stream)
                for output in self._news(stream, call):
                    if several:
                        output["index"] = call.streams.index(stream)
                    yield output

    def _news(self, stream: RequestStream, call: Call) -> Iterator[dict[str, Any]]:
        """What the reader has not seen; nothing when a token only began a character."""
        output = self._output(stream, call)
        text, shown = output["text"], stream.shown
        if call.piecewise:
            yield from _pieces(output, stream)
            return
        if len(text) == max(shown, 0) and shown >= 0 and not stream.finished and stream.logprobs is None:
            return
        stream.shown = len(text)
        yield output

    def _output(self, stream: RequestStream, call: Call) -> dict[str, Any]:
        hidden = call.prompt_only
        tokens, finish = ([], stream.log.finish and _NO_ANSWER) if hidden else (stream.log.tokens, stream.log.finish)
        meta: dict[str, Any] = {
            "id": call.public_id,
            "finish_reason": finish,
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": len(tokens),
            "cached_tokens": stream.cached_tokens,
            "reasoning_tokens": stream.reasoning_tokens,
            "weight_version": self.server_args.weight_version,
        }
        if stream.logprobs is not None:
            kept = stream.logprobs
            self.add_logprob_to_meta_info(meta, kept.state, kept.top, kept.token_ids, True)
            kept.place()
            meta.setdefault("input_top_logprobs", None)  # the text handler reads it even where none are wanted
            if hidden:
                meta |= {"output_token_logprobs": [], "output_top_logprobs": []}
        return {"text": "" if hidden else stream.visible, "output_ids": tokens, "meta_info": meta}

    def _accumulators(self, stream: RequestStream, request: TokenizedGenerateReqInput, echo_chars: int) -> Logprobs:
        state = ReqState([], False, asyncio.Event(), request, None)
        skip, spaces, _ = stream.decoding
        answer = Offsets(self.tokenizer, stream.prompt_tail, skip, spaces)
        answer.chars = echo_chars
        prompt = Offsets(self.tokenizer, [], True, spaces)
        return Logprobs(state, request.top_logprobs_num, request.token_ids_logprob, prompt, answer)

    def detokenize_logprob_tokens(
        self, token_logprobs_val: list[float], token_logprobs_idx: list[int], decode_to_text: bool
    ) -> list[TokenLogprob]:
        """As SGLang's, with each token's bytes."""
        texts = self.tokenizer.batch_decode([[token_id] for token_id in token_logprobs_idx])
        rows = zip(token_logprobs_val, token_logprobs_idx, texts, strict=True)
        return [TokenLogprob(value, id, text, token_bytes(self.tokenizer, id, text)) for value, id, text in rows]


def _pieces(output: dict[str, Any], stream: RequestStream) -> Iterator[dict[str, Any]]:
    """``output`` cut at every :data:`PIECE_CHARS` characters of the answer, and nowhere else before its end: SGLang's
    parsers lose part of what comes at once, and what they make of a text depends on where it was cut. An answer that
    went on in another engine, several tokens at a time, must not read differently for that."""
    text, shown = output["text"], stream.shown
    unfinished = {**output, "meta_info": {**output["meta_info"], "finish_reason": None}}
    stream.shown = len(text) if stream.finished else len(text) // PIECE_CHARS * PIECE_CHARS
    if shown < 0:
        yield {**unfinished, "text": ""}  # the first token is told at once
    for end in range(max(shown, 0) + PIECE_CHARS, len(text) + (not stream.finished), PIECE_CHARS):
        yield {**unfinished, "text": text[:end]}
    if stream.finished:
        yield output


@dataclass(slots=True)
class Logprobs:
    """SGLang's accumulators of one request, with what was asked for."""

    state: ReqState
    top: int
    token_ids: Sequence[int] | None
    prompt: Offsets
    answer: Offsets

    def place(self) -> None:
        """Gives new tokens their offsets."""
        rows = ((self.prompt, self.state.input_token_logprobs), (self.answer, self.state.output_token_logprobs))
        for offsets, tokens in rows:
            for token in tokens[offsets.placed :]:
                token.offset = offsets.place(token[1])


def new_call(request_id: str, prefix: str, objectives: Objectives, param: str) -> Call:
    """A call that arrived now."""
    return Call(request_id, prefix + request_id.removeprefix("req_"), objectives, time.time(), param)
