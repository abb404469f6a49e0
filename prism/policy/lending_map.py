"""Which models of a planned fleet share a server, and whose memory each borrows there (AQUA, section 5).

A model *lends* when its devices keep memory free at the largest load it can serve, and *borrows* when bursts make it
page. Only devices of one server reach each other fast, so that what a server's models lend and borrow should balance,
in bytes and in number (one lender's link carries one borrower's pages). The paper solves this as a program
(:mod:`prism.sim.lending_program`); this file has its objective, a bound below it, an answer in one pass
(:mod:`prism.policy.lending_search` improves it), and the matching inside a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

import numpy as np

from prism.core.errors import InvalidValue
from prism.core.ids import ModelName


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """One model of the plan. ``spare_bytes`` is per shard: above 0 it lends them, below 0 it borrows as many."""

    model: ModelName
    shards: int
    """Devices of its own, all in one server (its tensor-parallel ranks)."""
    spare_bytes: int

    @property
    def sign(self) -> int:
        """1: lends, -1: borrows, 0: neither."""
        return (self.spare_bytes > 0) - (self.spare_bytes < 0)


@dataclass(frozen=True, slots=True)
class Servers:
    """Equal servers of a planned fleet."""

    count: int
    gpus: int
    """Devices of each."""
    gpu_bytes: int
    """Memory of a device: what one more lender than borrowers weighs in the objective."""


@dataclass(frozen=True, slots=True)
class Lending:
    """``borrower``'s shard pages into ``lender``'s device; ``nbytes`` of what it needs fit there."""

    borrower: ModelName
    lender: ModelName
    nbytes: int


_COUNT: Final = 1 << 50
"""More than the net bytes of any server: 1,000 TB."""
_NOWHERE: Final = np.iinfo(np.int64).max
Assignment = list[int]
"""The server of each need, in the order of the needs."""


def imbalance_bytes(needs: Sequence[MemoryNeed], at: Sequence[int], servers: Servers) -> int:
    """The paper's objective (equation 6): the largest net memory of a server, plus a device's memory for each that
    lenders outnumber borrowers by on the server where they do most."""
    net_bytes, net_count = [0] * servers.count, [0] * servers.count
    for need, server in zip(needs, at, strict=True):
        net_bytes[server] += need.shards * need.spare_bytes
        net_count[server] += need.shards * need.sign
    return max(net_bytes) + servers.gpu_bytes * max(net_count)


def least_imbalance_bytes(needs: Sequence[MemoryNeed], servers: Servers) -> float:
    """A bound below :func:`imbalance_bytes` of every assignment: no largest is below the mean, no count a fraction."""
    total_bytes = sum(need.shards * need.spare_bytes for need in needs)
    return total_bytes / servers.count + servers.gpu_bytes * least_count(needs, servers)


def least_count(needs: Sequence[MemoryNeed], servers: Servers) -> int:
    """By how many lenders outnumber borrowers on the server where they do most, at the least. When every device has a
    model that lends or borrows, each server's count is even or odd as its number of devices is."""
    least = ceil(sum(need.shards * need.sign for need in needs) / servers.count)
    full = all(n.sign for n in needs) and sum(n.shards for n in needs) == servers.count * servers.gpus
    return least + 1 if full and (least - servers.gpus) % 2 else least


def check_fits(needs: Sequence[MemoryNeed], servers: Servers) -> None:
    """Raises :class:`InvalidValue` when the fleet has too few devices, or none of its servers enough for a model."""
    for need in needs:
        if need.shards > servers.gpus:
            raise InvalidValue("gpus", servers.gpus, f"{need.model} needs {need.shards} devices of one server")
    wanted = sum(need.shards for need in needs)
    if wanted > servers.count * servers.gpus:
        raise InvalidValue(
            "servers", servers.count, f"{wanted} devices are needed, {servers.count} x {servers.gpus} are there"
        )


def assign_in_turn(needs: Sequence[MemoryNeed], servers: Servers) -> Assignment | None:
    """In one pass, wide models first, then the most bytes lent or borrowed: each to the server that lacks its kind
    most, in number first, then in bytes. None: wide models do not fit beside each other this way.

    It is also the answer online, where models come one after the other; servers are compared at once (numpy), so that a
    thousand devices are planned in milliseconds.
    """
    gpus_left = np.full(servers.count, servers.gpus)
    balance = np.zeros(servers.count, dtype=np.int64)
    """Net count above, net bytes below: one number that compares as the pair does."""
    at: Assignment = [-1] * len(needs)
    for index in sorted(range(len(needs)), key=lambda i: (-needs[i].shards, -abs(needs[i].spare_bytes), i)):
        need = needs[index]
        sign = need.sign or 1
        score = np.where(gpus_left >= need.shards, sign * balance, _NOWHERE)
        best = int(score.argmin())
        if score[best] == _NOWHERE:
            return None
        at[index] = best
        gpus_left[best] -= need.shards
        balance[best] += need.shards * (need.sign * _COUNT + need.spare_bytes)
    return at


def match_lenders(needs: Sequence[MemoryNeed]) -> list[Lending]:
    """The stable matching of a server's borrowing and lending shards, one lender to a borrower (section 5).

    A borrower would have the lender that covers its need with the least left over, else the one with the most; a
    lender the borrower that uses most of it. Nobody could do better by leaving their partners for each other. Each
    shard is matched by itself.
    """
    borrowers = [need for need in needs if need.sign < 0 for _ in range(need.shards)]
    lenders = [need for need in needs if need.sign > 0 for _ in range(need.shards)]
    wishes = [sorted(range(len(lenders)), key=lambda j, b=b: _liking(b, lenders[j], j)) for b in borrowers]  # type: ignore[misc]
    partner: dict[int, int] = {}
    asked = [0] * len(borrowers)
    free = list(range(len(borrowers)))[::-1]
    while free:
        i = free.pop()
        if asked[i] == len(lenders):
            continue
        j = wishes[i][asked[i]]
        asked[i] += 1
        rival = partner.get(j)
        if rival is None or _use(borrowers[i], lenders[j]) > _use(borrowers[rival], lenders[j]):
            partner[j] = i
            if rival is not None:
                free.append(rival)
        else:
            free.append(i)
    return [
        Lending(borrowers[i].model, lenders[j].model, _use(borrowers[i], lenders[j]))
        for j, i in sorted(partner.items(), key=lambda pair: pair[1])
    ]


def _use(borrower: MemoryNeed, lender: MemoryNeed) -> int:
    return min(-borrower.spare_bytes, lender.spare_bytes)


def _liking(borrower: MemoryNeed, lender: MemoryNeed, tie: int) -> tuple[bool, int, int]:
    """Sorts a borrower's lenders, best first."""
    left = lender.spare_bytes + borrower.spare_bytes
    return left < 0, abs(left), tie
