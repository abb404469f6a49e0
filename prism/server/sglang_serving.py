"""SGLang's handlers for chat and text completions, used in parts: conversion, streaming generator, response builder.

Only their error rendering and LoRA syntax are replaced: a failure is an :class:`ApiError`, and a colon in a model's
name is part of the name.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn, Protocol

from pydantic import BaseModel
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChoiceLogprobs, CompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.managers.io_struct import GenerateReqInput

from prism.server.demand import Demand, demand_of
from prism.server.errors import ApiError, internal, invalid
from prism.server.requests import refused_by_sglang
from prism.server.sglang_logprobs import chat_logprobs, install
from prism.server.sglang_manager import Call, FrontManager
from prism.server.sglang_tools import constraint, demanded

install()


class Serving(Protocol):
    """One endpoint of one model."""

    def convert(self, request: Any) -> Any:
        """What is asked of the engine; renders the chat template. May raise nearly anything on odd input."""

    def demand(self, adapted: Any, exact: bool) -> Demand:
        """Tokens that the request may use; the lengths of texts are estimated, or with ``exact`` counted."""

    async def submit(self, adapted: Any, call: Call) -> None:
        """Into the queue. Raises :class:`ApiError`, or nearly anything on odd input."""

    async def answer(self, adapted: Any, request: Any) -> BaseModel | bytes:
        """The whole response. Raises :class:`ApiError`."""

    def events(self, adapted: Any, request: Any) -> AsyncIterator[str]:
        """Server-sent events up to ``[DONE]``. Raises :class:`ApiError` when the request fails, before or after the
        first event."""


class _Shared:
    """What both handlers change in SGLang's base class."""

    tokenizer_manager: FrontManager
    param: str
    """The field that holds the prompt."""

    def _resolve_lora_path(self, request_model: str, explicit_lora_path: Any) -> None:
        return None

    def create_error_response(
        self, message: str, err_type: str = "", status_code: int = 400, param: str | None = None
    ) -> NoReturn:
        raise invalid(message, param) if status_code < 500 else internal(message)

    def convert(self, request: Any) -> GenerateReqInput:
        problem = self._validate_request(request)  # type: ignore[attr-defined]
        if problem:
            raise refused_by_sglang(problem, type(request).model_fields)
        adapted, _ = self._convert_to_internal_request(request, None)  # type: ignore[attr-defined]
        _check_size(adapted, self.param)
        return adapted

    def demand(self, adapted: GenerateReqInput, exact: bool) -> Demand:
        manager = self.tokenizer_manager
        return demand_of(adapted, manager.context_len, manager.tokenizer if exact else None)

    async def submit(self, adapted: GenerateReqInput, call: Call) -> None:
        await self.tokenizer_manager.submit(adapted, call)

    async def _results(self, adapted: GenerateReqInput) -> list[Any]:
        steps = self.tokenizer_manager.generate_request(adapted)
        try:
            result = await anext(steps)
        finally:
            await steps.aclose()  # type: ignore[attr-defined]
        return result if isinstance(result, list) else [result]


def _check_size(adapted: GenerateReqInput, param: str) -> None:
    prompts = adapted.text if adapted.text is not None else adapted.input_ids
    rows = prompts if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else [prompts]
    if not all(rows):
        raise invalid("The prompt is empty.", param)


class ChatServing(_Shared, OpenAIServingChat):  # type: ignore[misc]
    param = "messages"

    def _process_messages(self, request: ChatCompletionRequest, is_multimodal: bool) -> Any:
        found = super()._process_messages(request, is_multimodal)
        if demanded(request) and self.tool_call_parser:
            thinking = self._get_reasoning_from_request(request) and not self.reasoning_parser
            tokenizer = self.tokenizer_manager.tokenizer
            found.tool_call_constraint = constraint(request, self.tool_call_parser, tokenizer, bool(thinking))
        return found

    def _process_response_logprobs(self, ret_item: dict[str, Any]) -> ChoiceLogprobs:
        meta = ret_item["meta_info"]
        return chat_logprobs(meta["output_token_logprobs"], meta.get("output_top_logprobs") or ())

    def _process_streaming_logprobs(
        self, content: dict[str, Any], n_prev_token: int, total_output_logprobs: int
    ) -> ChoiceLogprobs:
        meta, new = content["meta_info"], slice(n_prev_token, total_output_logprobs)
        return chat_logprobs(meta["output_token_logprobs"][new], (meta.get("output_top_logprobs") or ())[new])

    async def answer(self, adapted: GenerateReqInput, request: ChatCompletionRequest) -> BaseModel:
        return _model(self._build_chat_response(request, await self._results(adapted), int(time.time())))

    def events(self, adapted: GenerateReqInput, request: ChatCompletionRequest) -> AsyncIterator[str]:
        return _raising(self._generate_chat_stream(adapted, request, None), adapted.prism_call)


class TextServing(_Shared, OpenAIServingCompletion):  # type: ignore[misc]
    param = "prompt"

    def _validate_request(self, request: CompletionRequest) -> str | None:
        """SGLang takes the token 0 for nothing. Prompts that are empty are refused by the caller, with the field."""
        ids = isinstance(request.prompt, list) and bool(request.prompt) and isinstance(request.prompt[0], int)
        return None if ids else super()._validate_request(request)

    def _convert_to_internal_request(self, request: CompletionRequest, raw_request: Any = None) -> Any:
        adapted, request = super()._convert_to_internal_request(request, raw_request)
        if request.echo and request.logprobs is not None:
            adapted.logprob_start_len = 0  # SGLang leaves the prompt out when no alternatives are wanted
            adapted.prism_echo_chars = [len(text) for text in self._prepare_echo_prompts(request)]
        if request.max_tokens == 0:
            adapted.prism_prompt_only = True
            adapted.sampling_params["max_new_tokens"] = 1  # computed, as for any prompt, and not shown
        return adapted, request

    async def answer(self, adapted: GenerateReqInput, request: CompletionRequest) -> BaseModel:
        return _model(self._build_completion_response(request, await self._results(adapted), int(time.time())))

    def events(self, adapted: GenerateReqInput, request: CompletionRequest) -> AsyncIterator[str]:
        return _raising(self._generate_completion_stream(adapted, request, None), adapted.prism_call)


def _model(response: Any) -> BaseModel:
    if isinstance(response, BaseModel):
        return response
    raise internal("The answer could not be rendered.")


async def _raising(events: AsyncIterator[str], call: Call) -> AsyncIterator[str]:
    """``events``, except that a failure of the request is raised: SGLang's text handler would render it itself, without
    code and status, and end the stream as if all were well."""
    try:
        async for event in events:
            error = failure_of(call)
            if error is not None:
                raise error
            yield event
    finally:
        await events.aclose()  # type: ignore[attr-defined]


def failure_of(call: Call) -> ApiError | None:
    """The error of the first choice that failed."""
    return next((stream.error for stream in call.streams if stream.error is not None), None)
