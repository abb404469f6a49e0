"""Which instances of the simulated fleet serve before their weights are there, and over whom (the live agents' part:
:mod:`prism.node.live_pairs`): pairs with instances that have everything, and pipelines of those that come together.

Where instances that have everything exist, as many newcomers as there are such lead over one at once, and change over
to their pipeline when that serves and enough of their own is missing; their requests begin again then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prism.core.effects import Activate
from prism.core.ids import DeviceId, ModelName
from prism.core.instances import InstanceKey
from prism.core.settings import LiveMode
from prism.core.specs import ModelSpec
from prism.policy.live.able import whole_only
from prism.policy.live.routes import WORTH_SWITCHING
from prism.sim.activation import Activation, Mark
from prism.sim.device import SimDevice
from prism.sim.engine import Engine
from prism.sim.instance import SimInstance
from prism.sim.pairs import Pairs, first_share
from prism.sim.pipelines import Pipelines, SimSeat
from prism.sim.weight_roads import WeightRoads


class LiveStarts:
    """Of one world. ``serve`` is called when an instance can serve before its weights are there."""

    def __init__(
        self,
        instances: Mapping[InstanceKey, SimInstance],
        specs: Mapping[ModelName, ModelSpec],
        devices: Mapping[DeviceId, SimDevice],
        roads: WeightRoads,
        serve: Callable[[SimInstance], None],
    ) -> None:
        self._instances, self._specs, self._devices = instances, specs, devices
        self._roads, self._serve = roads, serve
        self._pairs, self._pipelines = Pairs(), Pipelines(roads.load.stage_wait)

    def seats(self, orders: Sequence[Activate]) -> Mapping[InstanceKey, SimSeat]:
        """In pipelines, of the ``orders`` of one model and one decision that are to form some."""
        found = [o for o in orders if len({part.node for part in o.parts}) == 1]
        if len(found) < 2 or whole_only(self._specs[found[0].model]):
            return {}
        model, cache = found[0].model, self._roads.host_cache
        warm = {o.parts[0].node for o in found if cache.has(o.parts[0].node, model)}
        pools = {o.key: tuple(dict.fromkeys(self._devices[id].pool for id in o.devices)) for o in found}
        return self._pipelines.deal(found, warm, len(cache.holders(model)), pools)

    def marks(self, effect: Activate, seat: SimSeat) -> tuple[Mark, ...]:
        """What is to be told of the weights on their way."""
        spec = self._specs[effect.model]
        if effect.live is LiveMode.WHOLE or whole_only(spec):
            return ()
        if seat.pipeline is None:
            return ((first_share(spec), self._first_pieces_here),) if self.whole(effect.model) else ()
        first = min(first_share(spec), seat.pipeline.part)
        if first < seat.pipeline.part:
            return ((first, self._first_pieces_here), (seat.pipeline.part, self._part_here))
        return ((first, self._part_here),)

    def whole(self, model: ModelName, leader: Engine | None = None) -> list[Engine]:
        """Engines of ``model`` but ``leader`` that take requests and have all weights."""
        found = (r for r in self._instances.values() if r.key.model == model and r.whole)
        return [r.engine for r in found if r.engine is not None and r.engine is not leader]

    def begins(self, record: SimInstance) -> None:
        """It serves, and has an engine; what it lacks others run."""
        engine, activation = record.engine, record.activation
        assert engine is not None
        if activation is None or activation.over:
            return
        pipeline = self._pipelines.of(record.key)
        if pipeline is not None and pipeline.serves:
            pipeline.leaders[record.key] = engine
            engine.lean_on(pipeline)
        else:
            self._pairs.lean(engine, self.whole(record.key.model, engine), lambda: activation.held_share)

    def alone(self, record: SimInstance) -> None:
        """It has all weights, and serves since before."""
        engine, lead = record.engine, self._devices[record.devices[0]]
        assert engine is not None
        pipeline = self._pipelines.of(record.key)
        if pipeline is not None and record.key in pipeline.leaders:
            del pipeline.leaders[record.key]
            elsewhere = 1.0 - 1.0 / len(pipeline.members)
            engine.lean_on(None, self._pairs.take_over_s(engine, elsewhere, lead.gpu.between_bytes_per_s))
        else:
            self._pairs.alone(engine, lead.gpu.between_bytes_per_s)

    def gone(self, record: SimInstance) -> None:
        """It is gone: nothing comes for it any more, and nobody leans on it."""
        activation, engine = record.activation, record.engine
        if activation is not None and not (engine is not None and activation.over):
            activation.cancel()
        for leader in self._pipelines.gone(record.key):
            self._lean_again(leader)
        if engine is not None:
            self._pairs.gone(engine, lambda leader: self.whole(leader.model, leader))

    def _lean_again(self, leader: Engine) -> None:
        record = self._instances[leader.key]
        activation = record.activation
        assert activation is not None
        self._pairs.lean(leader, self.whole(leader.model, leader), lambda: activation.held_share)

    # --- weights on their way ---

    def _first_pieces_here(self, activation: Activation) -> None:
        """An engine and its first pieces are there: it serves, if another one runs the rest. Of those that come as
        pipelines as many begin so as there are others."""
        whole = self.whole(activation.effect.model)
        if activation.effect.live is LiveMode.PIPELINES:
            whole = [engine for engine in whole if not self._pairs.led(engine)]
        if whole:
            self._serve(self._instances[activation.effect.key])

    def _part_here(self, activation: Activation) -> None:
        """It has its part: when all of the pipeline have theirs they serve."""
        pipeline = self._pipelines.of(activation.effect.key)
        if pipeline is None:
            return
        pipeline.here.add(activation.effect.key)
        for key in pipeline.members if pipeline.serves else ():
            record = self._instances[key]
            if record.activation is None or record.activation.over:
                continue
            if record.engine is None:
                self._serve(record)
            elif 1.0 - record.activation.held_share >= WORTH_SWITCHING:
                self._change_over(record.engine)

    def _change_over(self, engine: Engine) -> None:
        """From the one that it leans on to its pipeline: its requests begin again."""
        pipeline = self._pipelines.of(engine.key)
        assert pipeline is not None
        self._pairs.leave(engine)
        pipeline.leaders[engine.key] = engine
        engine.lean_on(pipeline, engine.used_tokens_now() / engine.cost.prefill_tokens_per_s(512))
