"""One multicast as the machines that take part in it see it: the cut of the data and each node's part of the plan."""

from __future__ import annotations

import msgspec

from prism.policy.multicast.planner import Plan
from prism.weights.packs.format import PackHeader, PackKey


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node does in a session. The controller makes one per node (:func:`node_plans`) and sends them out."""

    session: str
    key: PackKey
    node: str
    """Whose part this is."""
    addresses: dict[str, str]
    """``HOST:PORT`` of every node of the session."""
    sources: tuple[str, ...]
    """Nodes that hold everything from the start."""
    pieces: int
    receives: tuple[tuple[str, int], ...] = ()
    """(from whom, which piece), in order. Empty for a node that joins later: it takes pieces wherever they are."""
    sends: tuple[tuple[str, int], ...] = ()
    """(to whom, which piece), in order."""
    steps: tuple[int, ...] = ()
    """The plan's step of each of ``receives``."""
    piece_s: float = 0.0
    """What the planner expects one piece to take on a link; 0: unknown."""
    mover: str = "tcp"

    @property
    def first_step(self) -> int:
        """How many steps of the plan go by before this node's first piece comes."""
        return self.steps[0] if self.steps else 0


def node_plans(
    plan: Plan, session: str, key: PackKey, addresses: dict[str, str], mover: str = "tcp"
) -> dict[str, NodePlan]:
    """Every node's part of ``plan``. ``addresses`` has every node of the plan."""
    schedule, names = plan.schedule, plan.nodes
    receives: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    sends: dict[str, list[tuple[str, int]]] = {name: [] for name in names}
    steps: dict[str, list[int]] = {name: [] for name in names}
    columns = (schedule.step, schedule.src, schedule.dst, schedule.block)
    for step, src, dst, block in zip(*(c.tolist() for c in columns), strict=True):
        steps[names[dst]].append(step)
        receives[names[dst]].append((names[src], block))
        sends[names[src]].append((names[dst], block))
    known = {name: addresses[name] for name in names}
    piece_s = plan.expected_s / max(schedule.steps, 1)
    return {
        name: NodePlan(
            session=session,
            key=key,
            node=name,
            addresses=known,
            sources=names[: schedule.sources],
            pieces=schedule.blocks,
            receives=tuple(receives[name]),
            sends=tuple(sends[name]),
            steps=tuple(steps[name]),
            piece_s=piece_s,
            mover=mover,
        )
        for name in names
    }


def cut(header: PackHeader, pieces: int) -> list[range]:
    """The leaves of each piece: ``pieces`` contiguous runs of nearly equal length, in order. With fewer leaves than
    pieces some are empty (and need no transfer)."""
    return [range(header.leaves * i // pieces, header.leaves * (i + 1) // pieces) for i in range(pieces)]


def piece_bytes(header: PackHeader, leaves: range) -> tuple[int, int]:
    """Offset and length of a piece in the data area."""
    if not leaves:
        return 0, 0
    first = header.leaf_range(leaves[0])[0]
    return first, header.leaf_range(leaves[-1])[1] - first
