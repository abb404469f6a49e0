"""A better assignment of models to servers from a given one, by exchanges (see :mod:`prism.policy.lending_map`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import numpy as np
import numpy.typing as npt

from prism.policy.lending_map import Assignment, MemoryNeed, Servers, imbalance_bytes
from prism.policy.lending_pairs import PairSearch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]
_LEAST_FALL: Final = 1e-9
_MOST_DIVISIONS: Final = 1 << 24
"""Of pairs of servers that are looked at: about a second."""


@dataclass(slots=True)
class _Balance:
    gpus_left: int
    net_bytes: int = 0
    net_count: int = 0


def improve(needs: Sequence[MemoryNeed], at: Assignment, servers: Servers, most_rounds: int = 1000) -> Assignment:
    """Exchange and move models as long as it helps; at most ``most_rounds`` times each. The objective never grows.

    1. All servers towards the same net memory and count: the largest fall of the sum of squares, over all pairs. It
       has few traps, and it is not yet the objective. Few models change places at first; then two servers at a time
       are dealt anew, whatever it takes.
    2. Away from the servers that are the largest, which is.
    """
    level = _levelled(needs, at, servers, most_rounds)
    level = PairSearch(needs, level, servers).run(_MOST_DIVISIONS)
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


def _put(server: _Balance, need: MemoryNeed, times: int) -> None:
    server.gpus_left -= times * need.shards
    server.net_bytes += times * need.shards * need.spare_bytes
    server.net_count += times * need.shards * need.sign


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
