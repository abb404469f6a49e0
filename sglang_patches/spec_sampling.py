"""Guessed tokens change nothing but the time: what is accepted is what would have been drawn one token at a time.

SGLang's check of a tree draws by ``torch.rand`` (on a CPU it takes the likeliest token whatever was asked for), counts
penalties as they stood before the step, and so answers otherwise than without guesses. Here the token behind each node
is drawn first, by the request's seed and the node's position as ever, and a guess is accepted if it is that token. A
request whose draws depend on the tokens before them in more ways (penalties, a least length) has its root checked only:
one token a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.hooks import Hook, HookKind


def draw_tree(
    original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, vocab_mask: Any = None
) -> Any:
    """Around ``eagle_sample``. Returns, of all nodes, the tokens behind the accepted ones [requests * nodes], how many
    tokens each request gets [requests], and the numbers of its accepted nodes [requests, depth] (-1: none)."""
    if batch.forward_mode.is_idle():
        return original(verify_input, batch, logits_output, vocab_mask)
    from sglang.srt.speculative.eagle_utils import verify_tree_greedy_func

    logits, nodes = logits_output.next_token_logits, verify_input.draft_token_num
    _apply_wishes(logits, batch.sampling_info, nodes, verify_input, vocab_mask)
    if rows := [row for row, req in enumerate(batch.reqs) if counts_tokens(req.sampling_params)]:
        verify_input.retrieve_next_token[rows, 0] = -1
    drawn = draw(logits, batch.sampling_info, verify_input.positions, nodes).view(-1, nodes)
    shape = (len(drawn), verify_input.max_tree_depth)
    predicts, accepted, count = verify_tree_greedy_func(
        predicts=torch.zeros(drawn.numel(), dtype=torch.int32, device=logits.device),
        accept_index=torch.full(shape, -1, dtype=torch.int32, device=logits.device),
        accept_token_num=torch.empty(len(drawn), dtype=torch.int32, device=logits.device),
        candidates=verify_input.draft_token.view(-1, nodes),
        retrieve_index=verify_input.retrieve_index,
        retrieve_next_token=verify_input.retrieve_next_token,
        retrieve_next_sibling=verify_input.retrieve_next_sibling,
        target_predict=drawn,
        topk=verify_input.tree_topk,
    )
    return predicts, count + 1, accepted


def counts_tokens(params: Any) -> bool:
    """Whether what a request may draw depends on the tokens it has drawn, beyond the model and a grammar."""
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def _apply_wishes(logits: torch.Tensor, info: Any, nodes: int, verify_input: Any, vocab_mask: Any) -> None:
    """Penalties, biases and grammars, on every node of their request."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    if info.acc_additive_penalties is not None:
        logits.add_(info.acc_additive_penalties.repeat_interleave(nodes, 0))
    if info.acc_scaling_penalties is not None:
        apply_scaling_penalties(logits, info.acc_scaling_penalties.repeat_interleave(nodes, 0))
    if vocab_mask is not None:
        verify_input.grammar.apply_vocab_mask(logits=logits, vocab_mask=vocab_mask)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias.repeat_interleave(nodes, 0))


def draw(logits: torch.Tensor, info: Any, positions: torch.Tensor, nodes: int) -> torch.Tensor:
    """The token behind each node [requests * nodes], int64, as SGLang's sampler draws it behind a sequence that ends
    with that node. ``logits`` [requests * nodes, vocabulary] stay as they are."""
    if info.is_all_greedy:
        return logits.argmax(-1)
    from sglang.srt.layers import sampler

    wide = {
        name: getattr(info, name).repeat_interleave(nodes, 0)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
    }
    probs = torch.softmax(logits / wide["temperatures"], dim=-1)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        chosen = sampler.sampling_from_probs_torch(probs, sampling_seed=wide["sampling_seed"], positions=positions)
    else:
        chosen = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            wide["top_ks"],
            wide["top_ps"],
            wide["min_ps"],
            info.need_min_p_sampling,
            wide["sampling_seed"],
            positions,
        )
    return chosen.view(-1).to(torch.int64)


def last_tokens(batch: Any) -> torch.Tensor:
    """The token that each sequence ends with [requests], before a decoding step."""
    info = batch.spec_info
    if batch.spec_algorithm.is_none():
        tokens: torch.Tensor = batch.input_ids
        return tokens
    found: torch.Tensor
    if (found := getattr(info, "bonus_tokens", None)) is None:  # n-grams; a model that guesses is shown the last
        accepted = info.accept_tokens.view(-1, info.draft_token_num)
        found = accepted.gather(1, info.accept_lens.view(-1, 1).long() - 1).view(-1)
    return found.to(torch.int64)


HOOKS = tuple(
    Hook(
        f"sglang.srt.speculative.{module}.eagle_sample",
        HookKind.AROUND,
        draw_tree,
        ("verify_input", "batch", "logits_output", "vocab_mask"),
        "seeds, penalties and resumed answers hold with guesses too",
    )
    for module in ("ngram_worker", "eagle_worker_common")
)
