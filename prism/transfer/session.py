"""One multicast as the machines that take part in it see it: the cut of the data and each node's part of the plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from prism.policy.multicast.planner import Plan
from prism.policy.multicast.topology import NetworkTopology
from prism.transfer.windows import LeafCut


class NodePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one node does in a session. The controller makes one per node (:func:`node_plans`) and sends them out."""

    session: str
    window: str
    """What is sent: the window's name, the same on every node."""
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
    guessed: bool = False
    """That is a guess: nothing is known of the links. Nobody is late, or slow, by it."""
    near: tuple[str, ...] = ()
    """Nodes of the session to and from which this one has links of their own: what goes there takes nothing of its
    network link, and says nothing of it."""
    first: tuple[int, ...] = ()
    """Pieces that are wanted before all others, where the plan is not followed."""
    network: str = "tcp"
    """``tcp``, or a one-sided network to be used with the peers that offer it."""

    @property
    def known_piece_s(self) -> float:
        """What one piece takes on a link; 0: nobody knows."""
        return 0.0 if self.guessed else self.piece_s

    @property
    def first_step(self) -> int:
        """How many steps of the plan go by before this node's first piece comes."""
        return self.steps[0] if self.steps else 0


def node_plans(
    plan: Plan,
    session: str,
    window: str,
    addresses: dict[str, str],
    network: str = "tcp",
    first: Sequence[int] = (),
    ends: Collection[int] = (),
    topology: NetworkTopology | None = None,
    guessed: bool = False,
) -> dict[str, NodePlan]:
    """Every node's part of ``plan``, which brings the pieces ``first`` first, but for ``ends`` where they come late.
    ``addresses`` has every node of the plan, ``topology`` those with links of their own between them. ``guessed``:
    nothing is known of the links."""
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
    near_of = (topology or NetworkTopology()).near
    piece_s = plan.expected_s / max(schedule.steps, 1)
    return {
        name: NodePlan(
            session=session,
            window=window,
            node=name,
            addresses=known,
            sources=names[: schedule.sources],
            pieces=schedule.blocks,
            receives=tuple(receives[name]),
            sends=tuple(sends[name]),
            steps=tuple(steps[name]),
            piece_s=piece_s,
            guessed=guessed,
            near=tuple(n for n in names if n in near_of(name)),
            first=tuple(piece for piece in first if name not in plan.late or piece not in ends),
            network=network,
        )
        for name in names
    }


def cut_pieces(cut: LeafCut, pieces: int) -> list[range]:
    """The leaves of each piece: ``pieces`` contiguous runs of nearly equal length, in order. With fewer leaves than
    pieces some are empty (and need no transfer)."""
    return [range(cut.leaves * i // pieces, cut.leaves * (i + 1) // pieces) for i in range(pieces)]


def piece_bytes(cut: LeafCut, leaves: range) -> tuple[int, int]:
    """Offset and length of a piece in the window."""
    if not leaves:
        return 0, 0
    first = cut.bounds(leaves[0])[0]
    return first, cut.bounds(leaves[-1])[1] - first
