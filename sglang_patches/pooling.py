"""Requests for a vector or scores: what is wrong with one ends that request only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import torch

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.seat import Seat

log = logging.getLogger(__name__)


def take_in(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> None:
    """Around ``Scheduler.handle_embedding_request``."""
    seat: Seat = scheduler.server_args.prism_seat
    problem = find_problem(recv_req, scheduler)
    if problem is not None:
        seat.reject(recv_req.rid, problem, HTTPStatus.BAD_REQUEST)
        return
    if _token_types(scheduler) is None:
        recv_req.token_type_ids = None  # nobody looks at them
    elif not recv_req.token_type_ids:
        recv_req.token_type_ids = [0] * len(recv_req.input_ids)  # a step takes them of all its requests or of none
    try:
        if recv_req.lora_id is not None and (refusal := seat.take_adapter(recv_req.lora_id)) is not None:
            seat.reject(recv_req.rid, *refusal)
            return
        original(scheduler, recv_req)
    except Exception as error:
        log.exception("request %s could not be taken in", recv_req.rid)
        seat.reject(recv_req.rid, f"{type(error).__name__}: {error}", HTTPStatus.BAD_REQUEST)


def find_problem(recv_req: Any, scheduler: Any) -> str | None:
    """What in the request would break a batch that others share; None if nothing."""
    vocab, ids = scheduler.model_config.vocab_size, recv_req.input_ids
    if scheduler.is_generation:
        return "this model generates text: it answers with no vectors or scores"
    if ids is None or len(ids) == 0:
        return "the input has no tokens"
    if min(ids) < 0 or max(ids) >= vocab:
        return f"input token ids must be in [0, {vocab}) for this model"
    if len(ids) >= scheduler.max_req_input_len:
        return f"the input has {len(ids)} tokens, and there is room for {scheduler.max_req_input_len - 1}"
    types, kinds = recv_req.token_type_ids, _token_types(scheduler)
    if types and kinds is not None and (len(types) != len(ids) or not all(0 <= kind < kinds for kind in types)):
        return "the tokens' types do not fit the tokens"
    if recv_req.dimensions is not None and not 0 < recv_req.dimensions <= scheduler.model_config.hidden_size:
        return f"dimensions must be in [1, {scheduler.model_config.hidden_size}] for this model"
    if recv_req.positional_embed_overrides is not None or recv_req.return_pooled_hidden_states:
        return "embeddings in the input and hidden states in the answer are not served"
    if recv_req.multi_item_delimiter_indices is not None:
        return "several items in one input are not served"
    return None


def _token_types(scheduler: Any) -> int | None:
    """How many types of tokens the model knows; None: it looks at none."""
    found = getattr(scheduler.model_config.hf_config, "type_vocab_size", None)
    return None if found is None else int(found)


def no_bias(_: Any, model: Any, *__: Any, **___: Any) -> None:
    """After the ``__init__`` of Qwen's classifiers: the head of such checkpoints has no bias, SGLang's has one, and
    what no file fills would stay random."""
    torch.nn.init.zeros_(model.score.bias)


HOOKS = (
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.handle_embedding_request",
        HookKind.AROUND,
        take_in,
        ("self", "recv_req"),
        "one bad request must not end the engine",
    ),
    *(
        Hook(
            f"sglang.srt.models.qwen{n}_classification.Qwen{n}ForSequenceClassification.__init__",
            HookKind.AFTER,
            no_bias,
            ("self", "config", "quant_config", "prefix"),
            "scores as Hugging Face has them",
        )
        for n in (2, 3)
    ),
)
