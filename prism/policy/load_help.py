"""Loading over other GPUs' links: who helps whom, and which of the ways into a GPU takes the next piece.

A GPU whose own link to host memory is idle takes pieces over it and passes them on to the GPU that loads, over a link
between the two that is much faster (BlitzScale's parallel loading, as Prism's section 5.2 takes it up). How fast each
way is shows as it is used: nothing is declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

Name = TypeVar("Name", bound=str)


@dataclass(frozen=True, slots=True)
class LoadWay:
    """One way into the GPU that loads: its own link, or a helper's."""

    bytes_per_s: float
    """As measured in this load; 0: nothing has come over it yet."""
    pending_bytes: int
    """Taken by it and not there yet."""


def takes_next(nbytes: int, left_bytes: int, way: LoadWay, others: Sequence[LoadWay]) -> bool:
    """Whether ``way`` takes the next ``nbytes`` of the ``left_bytes`` that nobody has taken: greedy by estimated
    finish.

    It does if they are there over it no later than all that is left would be over the ``others``, whose shares end
    together. A way that was not measured yet takes one piece, which measures it, if there is more than that.
    """
    if way.bytes_per_s <= 0:
        return way.pending_bytes == 0 and left_bytes > nbytes
    rate = sum(other.bytes_per_s for other in others)
    if rate <= 0:
        return True
    without_s = (left_bytes + sum(other.pending_bytes for other in others)) / rate
    return (way.pending_bytes + nbytes) / way.bytes_per_s <= without_s


def share_helpers(
    loading: Sequence[Name], idle: Sequence[Name], reached: Mapping[Name, Set[Name]], most: int
) -> dict[Name, tuple[Name, ...]]:
    """The helpers of each device that is ``loading``: ``most`` at most, of those that are ``idle`` and that it can
    reach (``reached``). No device helps two, none that loads helps, and nobody gets one more while another that could
    have it has fewer."""
    found: dict[Name, tuple[Name, ...]] = dict.fromkeys(loading, ())
    free = [device for device in idle if device not in found]
    for _ in range(most):
        for target in loading:
            near = reached.get(target, frozenset())
            helper = next((device for device in free if device in near), None)
            if helper is not None:
                free.remove(helper)
                found[target] += (helper,)
    return found
