"""How much KV an engine has mapped beyond the tokens in use: what is mapped ahead of use, as SGLang's admission counts.

The live rule (``sglang_patches/kv_demand.py``, docs/memory.md) and the simulated one (:mod:`prism.sim.kv`) are made of
these. Before every step the engine has mapped the next steps of what runs; before a step in which requests enter, also
what admission wants for them: their prompts, their whole answers, and what the running ones may still need. Pages that
run empty stay mapped until the engine rests or others wait for memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Final

LOOKAHEAD_STEPS: Final = 16
"""Decode steps that are covered ahead, so that the lease does not change at every step."""


def rounded(tokens: int, block: int) -> int:
    """``tokens`` in whole blocks."""
    return -(-tokens // block) * block


def next_steps_tokens(running: int, guesses: int = 0, page: int = 1) -> int:
    """Tokens that ``running`` requests take in their next steps, each of them whole pages of ``page`` tokens; with
    ``guesses`` tokens that one step guesses for each."""
    return running * rounded(LOOKAHEAD_STEPS + guesses, page)


def beyond_next_steps(remaining: Iterable[int], ratio: float, next_steps: int) -> int:
    """Tokens that admission keeps for the ``remaining`` answers of running requests beyond their ``next_steps``:
    ``ratio`` of each answer's rest."""
    return max(0, sum(ceil(tokens * ratio) for tokens in remaining) - next_steps)


def entering_tokens(tokens: int, answer: int, page: int = 1) -> int:
    """Tokens for which admission lets a request of ``tokens`` in: it wants its whole ``answer``, and more than its own
    and a page for alignment."""
    return rounded(tokens, page) + answer + page + 1
