"""How much of each kind of attention state the scheduler needs soon, counted as SGLang's admission counts it."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, Final, NamedTuple

from prism.policy.kv_ahead import LOOKAHEAD_STEPS, beyond_next_steps, entering_tokens, next_steps_tokens, rounded
from sglang_patches.remote_requests import requests_under_way
from sglang_patches.spec_memory import reserve_tokens

_CLIP_NEW_TOKENS: Final = 4096
"""SGLang's admission looks at most so many tokens of one request ahead (``CLIP_MAX_NEW_TOKENS``)."""


class GroupDemand(NamedTuple):
    """Tokens (states) beyond those in use."""

    running: int
    """Of what runs: its next steps, and the rest of a prompt that is taken in by chunks."""
    admissions: list[int]
    """Beyond that, of the first, the first two, ... of the requests that wait."""
    guesses: int = 0
    """Of what runs: what its next step takes for guessed tokens."""
    alone: int = 0
    """Of the first that waits, in any free slots: with nothing else in the engine it needs no more than that."""

    @property
    def step(self) -> int:
        """What decodes goes on only with so much."""
        return max(self.running // LOOKAHEAD_STEPS, self.guesses)


def demand_tokens(scheduler: Any, block: int, page: int = 1) -> GroupDemand:
    """Slots that grow with the sequence. In whole blocks of ``block`` tokens; the engine allocates pages of ``page``.
    Admission lets a request in only with what running requests may still need."""
    ratio = scheduler.new_token_ratio_tracker.current
    requests, guesses = running_requests(scheduler), reserve_tokens(scheduler)
    most = _answer_ahead(scheduler)
    running = rounded(next_steps_tokens(len(requests), guesses, page), block)
    chunked_answer = 0
    if (chunked := scheduler.chunked_req) is not None:
        running += rounded(_rest_of_prompt(chunked), block)
        chunked_answer = _remaining(chunked, most)
    extra = beyond_next_steps((_remaining(r, most) for r in requests), ratio, running - chunked_answer)
    lengths = [_length(r, page, most) + guesses for r in _admissible(scheduler, requests)]
    admissions = [extra + total for total in accumulate(rounded(length, block) for length in lengths)]
    return GroupDemand(running, admissions, len(requests) * guesses, next(iter(lengths), 0))


def demand_window(scheduler: Any, block: int, page: int = 1) -> GroupDemand:
    """Slots of layers that see a window: a sequence has its window, and while a chunk of its prompt is computed that
    chunk. SGLang lets a request in only if there is a whole window for it, whatever its length."""
    window, chunk = int(scheduler.tree_cache.sliding_window_size), scheduler.chunked_prefill_size or 1 << 30
    requests = running_requests(scheduler)
    running = rounded(next_steps_tokens(len(requests), page=page), block)
    if (chunked := scheduler.chunked_req) is not None:
        running += rounded(min(_rest_of_prompt(chunked), chunk), block)
    needs = [max(rounded(min(_tokens(r), chunk), page), window) + page + 1 for r in _admissible(scheduler, requests)]
    admissions = list(accumulate(rounded(need, block) for need in needs))
    return GroupDemand(running, admissions, alone=next(iter(needs), 0))


def demand_states(scheduler: Any, per_request: int) -> GroupDemand:
    """States of requests that wait: ``per_request`` for each, its own and those that the prefix cache is given. What
    runs has its state; while it is cached it may need one more."""
    requests = running_requests(scheduler)
    chunked = [] if scheduler.chunked_req is None else [scheduler.chunked_req]
    waiting = len(_admissible(scheduler, requests))
    admissions = [per_request * (i + 1) for i in range(waiting)]
    return GroupDemand(len(requests) + len(chunked), admissions, alone=next(iter(admissions), 0))


def running_requests(scheduler: Any) -> list[Any]:
    """Requests that decode, or will after the batch that runs now."""
    requests = [r for r in scheduler.running_batch.reqs if not r.finished()]
    if scheduler.last_batch is not None and scheduler.last_batch is not scheduler.running_batch:
        requests += [r for r in scheduler.last_batch.reqs if not r.finished()]
    known = {id(r) for r in requests}
    return requests + [r for r in requests_under_way(scheduler) if not r.finished() and id(r) not in known]


def _admissible(scheduler: Any, running: list[Any]) -> list[Any]:
    """Waiting requests for which the batch has places."""
    waiting: list[Any] = scheduler.waiting_queue[: max(0, scheduler.max_running_requests - len(running))]
    return waiting


def _tokens(req: Any) -> int:
    return len(req.origin_input_ids) + len(req.output_ids)


def _rest_of_prompt(chunked: Any) -> int:
    return max(_tokens(chunked) - len(chunked.prefix_indices), 0)


def _answer_ahead(scheduler: Any) -> int:
    """Tokens of an answer that admission counts: where requests make room for others before they end, those of the next
    steps."""
    return _CLIP_NEW_TOKENS if getattr(scheduler, "prism_fair", None) is None else LOOKAHEAD_STEPS


def _length(req: Any, page: int, most: int) -> int:
    """Tokens for which admission lets a waiting request in: it wants more than its own and a page for alignment."""
    return entering_tokens(_tokens(req), _remaining(req, most), page)


def _remaining(req: Any, most: int) -> int:
    left = int(req.sampling_params.max_new_tokens) - len(req.output_ids)
    return min(max(left, 0), most)
