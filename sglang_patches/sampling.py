"""Sampling that goes on exactly: penalties count tokens of earlier attempts, and every request has its own seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from sglang_patches.hooks import Hook, HookKind
from sglang_patches.kv_returns import to_device
from sglang_patches.spec_sampling import last_tokens


def request_seed(req: Any) -> int:
    """The request's seed: its own, or one that follows from its id, so that another engine draws the same tokens."""
    seed = req.sampling_params.sampling_seed
    return int(seed) & 0x7FFFFFFF if seed is not None else zlib.crc32(req.rid.encode())


def complete_sampling_info(info: Any, batch: Any, vocab_size: int) -> None:
    """After ``SamplingBatchInfo.from_schedule_batch``: seeds for all, penalties of tokens generated before."""
    info.sampling_seed = to_device(torch.tensor([request_seed(r) for r in batch.reqs], dtype=torch.int64), batch.device)
    restore_penalties(info.penalizer_orchestrator, batch.reqs)


def restore_penalties(orchestrator: Any, reqs: list[Any]) -> None:
    """Feed each penalizer the output tokens a retracted or resumed request already has (SGLang starts from none)."""
    from sglang.srt.sampling import penaltylib

    for kind, penalizer in orchestrator.penalizers.items():
        if not penalizer.is_prepared():
            continue
        for row, req in enumerate(reqs):
            if len(req.output_ids) == 0:
                continue
            ids = torch.tensor(list(req.output_ids), dtype=torch.int64, device=orchestrator.device)
            if kind is penaltylib.BatchedFrequencyPenalizer:
                penalty = penalizer.frequency_penalties[row].expand(ids.numel())
                penalizer.cumulated_frequency_penalties[row].scatter_add_(0, ids, penalty)
            elif kind is penaltylib.BatchedPresencePenalizer:
                penalizer.cumulated_presence_penalties[row, ids] = penalizer.presence_penalties[row]
            elif kind is penaltylib.BatchedRepetitionPenalizer:
                penalizer.cumulated_repetition_penalties[row, ids] = penalizer.repetition_penalties[row]
            elif kind is penaltylib.BatchedMinNewTokensPenalizer:
                penalizer.len_output_tokens[row] = ids.numel()


def count_on_host(original: Callable[..., Any], batch: Any) -> None:
    """Around ``ScheduleBatch.cumulate_penalty_output_tokens``: with a step in flight the host does not know the last
    token yet, and SGLang counts the one before it (a prompt's token at first). See :func:`count_on_device`."""
    if _mixes_steps():
        original(batch)


def count_on_device(original: Callable[..., Any], batch: Any, future_map: Any) -> None:
    """Around ``resolve_forward_inputs``, after which the tokens of the step before lie on the device: penalties count
    them there, with overlap or without, so that both answer alike and a resumed request goes on exactly."""
    original(batch, future_map)
    penalties = batch.sampling_info.penalizer_orchestrator
    if batch.forward_mode.is_decode() and penalties.is_required and not _mixes_steps():
        penalties.cumulate_output_tokens(last_tokens(batch))


def _mixes_steps() -> bool:
    """Steps may hold prompts and decoding requests together; then nothing is ever in flight (``server_arguments``)."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().enable_mixed_chunk)


def sample_filtered(
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Replaces ``top_k_top_p_min_p_sampling_from_probs_torch``, which cannot combine min-p with seeds and whose draws
    depend on the batch: SGLang filters all rows as soon as one asks for it, and the original draws by rank then.

    ``probs`` [batch, vocab]; returns token ids [batch], int32. A row without filters draws what it draws in a batch
    where nobody has any (``sampling_from_probs_torch``). The Gumbel maximum needs no renormalised weights.
    """
    from sglang.srt.layers.sampler import multinomial_with_seed

    ordered, order = probs.sort(dim=-1, descending=True)
    below = torch.cumsum(ordered, dim=-1) - ordered
    ranks = torch.arange(probs.shape[-1], device=probs.device).view(1, -1)
    # sums are not exact: without the second condition a top-p of 1 would drop the least likely tokens
    drop = (ranks >= top_ks.view(-1, 1)) | ((below > top_ps.view(-1, 1)) & (top_ps.view(-1, 1) < 1.0))
    if need_min_p_sampling:
        drop |= ordered < (ordered[:, 0] * min_ps).view(-1, 1)
    dropped = torch.zeros_like(drop).scatter_(1, order, drop)
    if sampling_seed is None:
        chosen: torch.Tensor = torch.multinomial(probs.masked_fill(dropped, 0.0), num_samples=1)
    else:
        chosen = multinomial_with_seed(torch.log(probs).masked_fill(dropped, -torch.inf), sampling_seed, positions)
    return chosen.view(-1).to(torch.int32)


_MASK32 = 0xFFFFFFFF


def hash_on_host(original: Callable[..., Any], seed: Any, positions: Any, col_indices: Any) -> Any:
    """Around ``murmur_hash32``, a GPU kernel: the same MurmurHash3 (seed's two words, position, column) on the CPU.

    ``seed`` and ``positions`` [rows], ``col_indices`` [columns]; returns uint32 [rows, columns].
    """
    if seed.device.type != "cpu":
        return original(seed, positions, col_indices)
    words = seed.view(torch.int64)
    state = torch.zeros((seed.shape[0], 1), dtype=torch.int64)
    for word in (words & _MASK32, (words >> 32) & _MASK32, positions.to(torch.int64) & _MASK32):
        state = _mix(state, word.view(-1, 1))
    state = _mix(state, col_indices.to(torch.int64).view(1, -1)) ^ 16
    state = _multiply(state ^ (state >> 16), 0x85EBCA6B)
    state = _multiply(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mix(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    state = state ^ _multiply(_rotate(_multiply(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotate(state, 13) * 5 + 0xE6546B64) & _MASK32


def _rotate(value: torch.Tensor, bits: int) -> torch.Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _MASK32


def _multiply(value: torch.Tensor, factor: int) -> torch.Tensor:
    # In two halves: the full product of two 32-bit numbers does not fit into a signed 64-bit one.
    low = value * (factor & 0xFFFF)
    high = (value * (factor >> 16)) & 0xFFFF
    return (low + (high << 16)) & _MASK32


HOOKS = (
    Hook(
        "sglang.kernels.ops.sampling.murmur_hash.murmur_hash32",
        HookKind.AROUND,
        hash_on_host,
        ("seed", "positions", "col_indices"),
        "seeded sampling has a GPU kernel only",
    ),
    Hook(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        HookKind.AFTER,
        lambda result, cls, batch, vocab_size: complete_sampling_info(result, batch, vocab_size),
        ("batch", "vocab_size"),
        "penalties and seeds of resumed and retracted requests",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        HookKind.AROUND,
        count_on_host,
        ("self",),
        "with overlap the host's last token is one behind",
    ),
    Hook(
        "sglang.srt.managers.scheduler.resolve_forward_inputs",
        HookKind.AROUND,
        count_on_device,
        ("batch", "future_map"),
        "penalties count the tokens that the device has",
    ),
    Hook(
        "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        HookKind.REPLACE,
        sample_filtered,
        ("probs", "top_ks", "top_ps", "min_ps", "need_min_p_sampling", "sampling_seed", "positions"),
        "min-p with a seed would end the engine",
    ),
)
