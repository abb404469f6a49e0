"""Instances that serve before their weights are there: another one of their model runs the layers that they lack.

::

    new engine   share f of every step, growing |            | its own pool
    peer                                        | 1 - f       | the peer's pool, beside what that engine does for itself

What the live agents do (:mod:`prism.node.live_pairs`), as far as it takes time: a step of the new engine lies on both
pools, in the parts of the layers, and takes a hop there and back more; a prefill goes in micro-batches, so that both
pools work on it at once. When all layers are there the KV of those that
ran elsewhere is fetched or made again (:func:`prism.policy.moving.choose_way`), once and at the end, where the live
engines do it in slices between steps. The KV that the peer keeps for it is in no account here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prism.core.specs import ModelSpec
from prism.policy.live.micro_batches import micro_batches
from prism.policy.live.scale_out import ComingTimes
from prism.policy.moving import Leg, choose_way
from prism.sim.engine import Engine, StepSplit
from prism.sim.sharing import Pool

HOP_S: Final = 0.0005
"""Activations from one engine to the other."""


def first_share(spec: ModelSpec) -> float:
    """Part of the weights that an instance has when it begins over another one."""
    return ComingTimes(1.0, None, spec.shape.layers).first_s


@dataclass(slots=True)
class Leaning:
    """How an engine serves while it loads."""

    own: tuple[Pool, ...]
    held_share: Callable[[], float]
    peer: Engine | None = None
    """None: it had one that is gone, and waits."""

    @property
    def hops_s(self) -> float:
        """Of one step."""
        return 2.0 * HOP_S

    @property
    def ready(self) -> bool:
        return self.peer is not None

    def split(self, prompts: Sequence[int]) -> StepSplit:
        """Both pools, each with its part of the layers."""
        assert self.peer is not None  # it is ready
        held = self.held_share()
        parts = len(micro_batches(prompts, 2)) if prompts else 1
        longer, shorter = max(held, 1.0 - held), min(held, 1.0 - held)
        length = longer + shorter / parts
        shares = (*[held / length] * len(self.own), *[(1.0 - held) / length] * len(self.peer.pools))
        return StepSplit((*self.own, *self.peer.pools), shares, length)


class Pairs:
    """Who leans on whom in one world."""

    def __init__(self) -> None:
        self._leaning: dict[Engine, Leaning] = {}

    def led(self, peer: Engine) -> int:
        """Engines whose layers ``peer`` runs."""
        return sum(leaning.peer is peer for leaning in self._leaning.values())

    def lean(self, engine: Engine, peers: Iterable[Engine], held_share: Callable[[], float]) -> None:
        """``engine`` serves over one of ``peers`` (at least one) until :meth:`alone`."""
        self._leaning[engine] = leaning = Leaning(engine.pools, held_share, self._least_busy(peers))
        engine.lean_on(leaning)

    def alone(self, engine: Engine, link_bytes_per_s: float) -> None:
        """``engine`` has all weights."""
        leaning = self._leaning.pop(engine, None)
        if leaning is None:
            return
        engine.lean_on(None, self.take_over_s(engine, 1.0, link_bytes_per_s))

    def leave(self, engine: Engine) -> None:
        """It leans on something else from now on."""
        self._leaning.pop(engine, None)

    @staticmethod
    def take_over_s(engine: Engine, elsewhere: float, link_bytes_per_s: float) -> float:
        """Until KV is here of the layers that ran ``elsewhere`` (part of all)."""
        tokens = engine.used_tokens_now()
        leg = Leg(int(elsewhere * tokens * engine.kv.bytes_per_token), link_bytes_per_s)
        choice = choose_way([leg], tokens, engine.cost.prefill_tokens_per_s(512))
        return min(choice.move_s, choice.recompute_s)

    def gone(self, engine: Engine, peers: Callable[[Engine], Iterable[Engine]]) -> None:
        """``engine`` ended: those that leaned on it lean on one of ``peers(leader)``, or wait for their weights."""
        self._leaning.pop(engine, None)
        for leader, leaning in self._leaning.items():
            if leaning.peer is engine:
                leaning.peer = self._least_busy(peers(leader))
                leader.lean_on(leaning)

    def _least_busy(self, peers: Iterable[Engine]) -> Engine | None:
        """That which runs layers for the fewest others, then the one with the fewest requests."""
        return min(peers, key=lambda e: (self.led(e), e.jobs, e.key), default=None)
