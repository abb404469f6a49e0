"""What a peer makes sure of before it touches anything for a leader: a wrong message ends no engine."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from prism.core.errors import PrismError
from prism.remote.messages import RunPieces


class BadMessage(PrismError):
    """A leader asked for something that cannot be; nothing was done."""


def check_work(
    work: RunPieces, held: Set[int], rows: int, width: int, slots: int, vocab: int, mrope: bool = False
) -> None:
    """Raises :class:`BadMessage` unless ``work`` can be run by an engine that has the pieces ``held``, with a request
    table of ``rows`` x ``width``, for a leader with ``slots`` slots. The head is never run for others. ``mrope``: the
    model's positions have three parts."""
    if not 0 <= work.first < work.end <= max(held, default=0) + 1 or not held >= set(range(work.first, work.end)):
        raise BadMessage(f"pieces [{work.first}, {work.end}) are not all here: there are {sorted(held)}")
    tokens, count = len(work.token_ids), len(work.rows)
    if not tokens or not count or len(work.out_slots) != tokens or len(work.positions) != tokens:
        raise BadMessage(f"{tokens} tokens, {len(work.out_slots)} slots and {len(work.positions)} positions")
    _within("rows", work.rows, rows)
    _within("out_slots", work.out_slots, slots)
    _within("token_ids", work.token_ids, vocab)
    _within("positions", work.positions, width)
    if [len(one) for one in work.mrope] != (3 * [tokens] if mrope else []):
        raise BadMessage(
            f"{[len(one) for one in work.mrope]} parts of positions, of {3 if mrope else 0} of {tokens} each"
        )
    for one in work.mrope:
        _within("mrope", one, width)
    _check_table(work, rows, width, slots)
    if len(set(work.rows)) != count or len(work.seq_lens) != count:
        raise BadMessage(f"{count} rows, {len(set(work.rows))} of them different, and {len(work.seq_lens)} lengths")
    if not all(0 < length <= width for length in work.seq_lens):
        raise BadMessage(f"sequence lengths must be in [1, {width}]")
    if work.since is not None:
        _check_since(work, held)
    if work.decode:
        if tokens != count:
            raise BadMessage(f"{tokens} tokens for {count} requests that decode")
        return
    _check_prefill(work, tokens, count)


def _check_table(work: RunPieces, rows: int, width: int, slots: int) -> None:
    if not len(work.table_rows) == len(work.table_positions) == len(work.table_slots):
        raise BadMessage(f"{len(work.table_slots)} slots for {len(work.table_rows)} places of the request table")
    if work.table_slots:
        _within("table_rows", work.table_rows, rows)
        _within("table_positions", work.table_positions, width)
        _within("table_slots", work.table_slots, slots)


def _check_since(work: RunPieces, held: Set[int]) -> None:
    """What ran elsewhere was to run here, and read no KV but its own."""
    assert work.since is not None
    if not 1 <= work.since < work.first or not held >= set(range(work.since, work.first)):
        raise BadMessage(f"pieces [{work.since}, {work.first}) are said to have run for this engine")
    if work.decode or any(work.prefix_lens):
        raise BadMessage("only prompts from their beginning are run in this engine's stead")


def _check_prefill(work: RunPieces, tokens: int, count: int) -> None:
    if not len(work.prefix_lens) == len(work.extend_lens) == count:
        raise BadMessage(f"{count} requests, {len(work.prefix_lens)} prefixes and {len(work.extend_lens)} extents")
    if sum(work.extend_lens) != tokens or min(work.extend_lens) < 1 or min(work.prefix_lens) < 0:
        raise BadMessage(f"{tokens} tokens do not make extents of {work.extend_lens}")
    for prefix, extend, length in zip(work.prefix_lens, work.extend_lens, work.seq_lens, strict=True):
        if prefix + extend != length:
            raise BadMessage(f"{prefix} and {extend} tokens make no length of {length}")


def _within(name: str, values: Sequence[int], bound: int) -> None:
    if min(values) < 0 or max(values) >= bound:
        raise BadMessage(f"{name} must be in [0, {bound}), got {min(values)} to {max(values)}")


def check_kv(tensors: Sequence[Any], wanted: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
    """Raises :class:`BadMessage` unless ``tensors`` are of these types and shapes."""
    found = [(t.dtype, tuple(t.shape)) for t in tensors]
    if found != list(wanted):
        raise BadMessage(f"K and V were to come as {wanted}, got {found}")


def check_state(tensors: Sequence[Any], wanted: range, tokens: int, hidden: int, dtype: Any) -> None:
    """Raises :class:`BadMessage` unless ``tensors`` are a state of as many parts as there may be."""
    if len(tensors) not in wanted or any(t.dtype != dtype or tuple(t.shape) != (tokens, hidden) for t in tensors):
        shapes = [(str(t.dtype), tuple(t.shape)) for t in tensors]
        raise BadMessage(
            f"a state here is {wanted.start} to {wanted.stop - 1} tensors of {tokens} x {hidden} {dtype}, got {shapes}"
        )
