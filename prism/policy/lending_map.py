"""Which models of a planned fleet share a server, and whose memory each borrows there (AQUA, section 5).

A model *lends* when its devices keep memory free at the largest load it can serve, and *borrows* when bursts make it
page. Only devices of one server reach each other fast, so that what a server's models lend and borrow should balance,
in bytes and in number (one lender's link carries one borrower's pages). The paper solves this as a program
(:mod:`prism.sim.lending_program`); this file has its objective, a bound below it, an answer in one pass that a local
search improves, and the matching inside a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil
from typing import Final

import numpy as np
import numpy.typing as npt

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


@dataclass(slots=True)
class _Balance:
    gpus_left: int
    net_bytes: int = 0
    net_count: int = 0


_COUNT: Final = 1 << 50
"""More than the net bytes of any server: 1,000 TB."""
_NOWHERE: Final = np.iinfo(np.int64).max
_LEAST_FALL: Final = 1e-9
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
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


def _put(server: _Balance, need: MemoryNeed, times: int) -> None:
    server.gpus_left -= times * need.shards
    server.net_bytes += times * need.shards * need.spare_bytes
    server.net_count += times * need.shards * need.sign


def improve(needs: Sequence[MemoryNeed], at: Assignment, servers: Servers, most_rounds: int = 1000) -> Assignment:
    """Exchange and move models as long as it helps; at most ``most_rounds`` times each. The objective never grows.

    1. All servers towards the same net memory and count: the largest fall of the sum of squares, over all pairs. It
       has few traps, and it is not yet the objective.
    2. Away from the servers that are the largest, which is.
    """
    level = _levelled(needs, at, servers, most_rounds)
    at = min((level, list(at)), key=lambda found: imbalance_bytes(needs, found, servers))
    for _ in range(most_rounds):
        better = _better(needs, at, servers)
        if better is None:
            break
        at = better
    return at


def _levelled(needs: Sequence[MemoryNeed], at: Assignment, servers: Servers, most_rounds: int) -> Assignment:
    """Step 1. One or two models of a server change places with one, two or none of another's; what that does to the
    sum of squares is known for all of them at once."""
    weights = np.array([[n.shards * n.spare_bytes / servers.gpu_bytes, n.shards * n.sign] for n in needs], dtype=float)
    shards = np.array([n.shards for n in needs])
    here = np.array(at)
    for _ in range(most_rounds):
        bundles = _bundles(here, servers)
        step = _best_exchange(bundles, weights, shards, here, servers)
        if step is None:
            break
        (first, first_to), (second, second_to) = step
        here[list(first)], here[list(second)] = first_to, second_to
    return [int(server) for server in here]


_Bundle = tuple[int, ...]
"""Models of one server."""
_MOST_BUNDLES: Final = 1500
"""Comparing all with all takes a few bytes for each pair; a fleet with more exchanges single models only."""


def _bundles(here: Ints, servers: Servers) -> list[tuple[int, _Bundle]]:
    """(server, models): none, each, and each two of every server."""
    found: list[tuple[int, _Bundle]] = []
    for server in range(servers.count):
        mine = [int(i) for i in np.flatnonzero(here == server)]
        found += [(server, ()), *((server, (i,)) for i in mine)]
    if len(here) * servers.gpus // 2 + len(found) <= _MOST_BUNDLES:
        for server in range(servers.count):
            mine = [int(i) for i in np.flatnonzero(here == server)]
            found += [(server, pair) for pair in combinations(mine, 2)]
    return found


def _best_exchange(
    bundles: Sequence[tuple[int, _Bundle]], weights: Floats, shards: Ints, here: Ints, servers: Servers
) -> tuple[tuple[_Bundle, int], tuple[_Bundle, int]] | None:
    """The two bundles whose exchange lets the sum of squares fall most, each with its next server."""
    of = np.array([server for server, _ in bundles])
    weight = np.array([weights[list(models)].sum(axis=0) for _, models in bundles])
    size = np.array([shards[list(models)].sum() for _, models in bundles])
    net = np.zeros((servers.count, 2))
    np.add.at(net, here, weights)
    left = (servers.gpus - np.bincount(here, weights=shards, minlength=servers.count))[of]
    fall = np.zeros((len(bundles), len(bundles)))
    for column in range(2):
        by = weight[None, :, column] - weight[:, None, column]
        fall += 2 * by * (by + net[of, column][:, None] - net[of, column][None, :])
    grows = size[None, :] - size[:, None]
    fall[(of[:, None] == of[None, :]) | (grows > left[:, None]) | (-grows > left[None, :])] = np.inf
    i, j = divmod(int(fall.argmin()), len(bundles))
    if fall[i, j] > -_LEAST_FALL:
        return None
    return (bundles[i][1], int(of[j])), (bundles[j][1], int(of[i]))


def _better(needs: Sequence[MemoryNeed], at: Assignment, servers: Servers) -> Assignment | None:
    """The assignment after the best step away from the server with the largest net memory or count."""
    found = [_Balance(servers.gpus) for _ in range(servers.count)]
    for need, server in zip(needs, at, strict=True):
        _put(found[server], need, 1)
    best: tuple[tuple[int, int], Assignment] | None = None
    now = _score(found, servers)
    for worst in {
        max(range(servers.count), key=lambda s: found[s].net_bytes),
        max(range(servers.count), key=lambda s: found[s].net_count),
    }:
        for step in _steps(needs, at, found, worst):
            _apply(needs, at, found, step, 1)
            score = _score(found, servers)
            _apply(needs, at, found, step, -1)
            if score < (best[0] if best else now):
                after = list(at)
                for index, server in step:
                    after[index] = server
                best = score, after
    return None if best is None else best[1]


def _score(found: Sequence[_Balance], servers: Servers) -> tuple[int, int]:
    """The objective, then how uneven the servers are: many steps leave the largest alone and help the next one."""
    largest = max(s.net_bytes for s in found) + servers.gpu_bytes * max(s.net_count for s in found)
    return largest, sum(s.net_bytes**2 + (servers.gpu_bytes * s.net_count) ** 2 for s in found)


_Step = tuple[tuple[int, int], ...]
"""(index of the need, its next server) of those that move."""


def _steps(needs: Sequence[MemoryNeed], at: Assignment, found: Sequence[_Balance], worst: int) -> list[_Step]:
    """Moves of one model from ``worst`` and exchanges with one elsewhere, each kind of model once per server."""
    steps: list[_Step] = []
    mine = list({(needs[i].shards, needs[i].spare_bytes): i for i in range(len(needs)) if at[i] == worst}.values())
    others = {(at[j], needs[j].shards, needs[j].spare_bytes): j for j in range(len(needs)) if at[j] != worst}
    for i in mine:
        steps += [((i, s),) for s, server in enumerate(found) if s != worst and server.gpus_left >= needs[i].shards]
        for (server_of_j, shards, spare), j in others.items():
            if (shards, spare) == (needs[i].shards, needs[i].spare_bytes):
                continue
            grows = needs[i].shards - shards
            if found[server_of_j].gpus_left >= grows and found[worst].gpus_left >= -grows:
                steps.append(((i, server_of_j), (j, worst)))
    return steps


def _apply(needs: Sequence[MemoryNeed], at: Assignment, found: Sequence[_Balance], step: _Step, times: int) -> None:
    for index, server in step:
        _put(found[at[index]], needs[index], -times)
        _put(found[server], needs[index], times)


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
