"""The engines of one device: which are up, which of them serves a model, and which request is in which.

They prefill at once on one device, so the clock by which their speeds are measured is kept here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prism.core.device_events import EngineLoad, EngineUp
from prism.core.ids import ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.specs import DeviceKind
from prism.policy.latency_model import PrefillSpeed, SharedClock
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_promises import Promises


class DeviceEngines:
    """Owned by one :class:`prism.scheduler.gpu.GpuScheduler`. Events about requests and instances that are not here
    change nothing."""

    def __init__(self, decode_reserve_tokens: int, kind: DeviceKind, pauses: bool = False) -> None:
        self._reserve_tokens = decode_reserve_tokens
        self.promises = Promises(kind, pauses)
        self._engines: dict[InstanceKey, EngineState] = {}
        self._serving: dict[ModelName, EngineState] = {}
        """Who gets a model's requests: of its instances that do not drain, the one that came up last."""
        self._engine_of: dict[RequestId, EngineState] = {}
        self._orphans: dict[RequestId, Request] = {}
        """Dispatched requests whose engine is gone and whose delivered tokens are not known yet."""
        self._clock = SharedClock()
        self.speeds_version = 0
        """Another one whenever :meth:`prefill_s` may say something else."""

    # --- questions ---

    def __iter__(self) -> Iterator[EngineState]:
        """Those that are up, draining ones included, in the order in which they came up."""
        return iter(self._engines.values())

    def get(self, key: InstanceKey) -> EngineState | None:
        return self._engines.get(key)

    def serving(self, model: ModelName) -> EngineState | None:
        """Who gets the model's requests; None: it is not active here."""
        return self._serving.get(model)

    def of(self, model: ModelName) -> EngineState:
        """Who gets the requests of a model that is active here, as every model with waiting requests is."""
        return self._serving[model]

    def owns(self, id: RequestId) -> bool:
        """It was dispatched, and has not left."""
        return id in self._engine_of or id in self._orphans

    @property
    def run_nothing(self) -> bool:
        """No request is in an engine."""
        return not self._engine_of

    # --- engines come and go ---

    def came_up(self, up: EngineUp, now_s: float) -> None:
        """It serves its model from now on; one of the same key is gone."""
        previous = self._engines.pop(up.key, None)
        if previous is not None:
            self._orphan(previous, now_s)
        engine = EngineState(up, PrefillSpeed(up.prefill_tokens_per_s), self._reserve_tokens)
        self._engines[up.key] = self._serving[up.key.model] = engine
        self.speeds_version += 1

    def went_down(self, key: InstanceKey, now_s: float) -> bool:
        """It is gone; False: it was not here. :meth:`choose_serving` is to follow."""
        engine = self._engines.pop(key, None)
        if engine is not None:
            self._orphan(engine, now_s)
        return engine is not None

    def drains(self, key: InstanceKey) -> None:
        """It takes no more requests. :meth:`choose_serving` is to follow."""
        if engine := self._engines.get(key):
            engine.draining = True

    def choose_serving(self, model: ModelName) -> bool:
        """An instance of the model drains or is gone: another one gets its requests. False: there is none."""
        left = [e for e in self._engines.values() if e.up.key.model == model and not e.draining]
        self.speeds_version += 1
        if left:
            self._serving[model] = left[-1]
        else:
            self._serving.pop(model, None)
        return bool(left)

    def take_load(self, load: EngineLoad) -> None:
        """An engine has told its counters."""
        if engine := self._engines.get(load.key):
            engine.take_load(load)

    # --- requests come and go ---

    def dispatched(self, engine: EngineState, request: Request, claim_tokens: int, now_s: float) -> None:
        """The request is in ``engine`` from now on and will take ``claim_tokens`` there."""
        engine.dispatched(request, claim_tokens, self._clock.advance(now_s), now_s)
        self._engine_of[request.id] = engine
        self.promises.changed(engine, now_s)
        self._count_sharer(engine, now_s)

    def first_token(self, id: RequestId, now_s: float) -> None:
        """Its prefill is done."""
        engine = self._engine_of.get(id)
        if engine is not None:
            self.speeds_version += 1
            if engine.first_token(id, self._clock.advance(now_s), self.promises.clock_s(now_s), now_s):
                self.promises.answered()
            self._count_sharer(engine, now_s)

    def finished(self, id: RequestId, generated_tokens: int, now_s: float) -> None:
        """Its last token is out, ``generated_tokens`` of all attempts."""
        if engine := self._engine_of.get(id):
            answer = engine.answered(id, generated_tokens, now_s)
            if answer is not None:
                self.promises.learn(engine, answer, now_s)
        self.left(id, now_s)

    def left(self, id: RequestId, now_s: float) -> Request | None:
        """The request is in no engine any more. None if it was in none."""
        self._orphans.pop(id, None)
        engine = self._engine_of.pop(id, None)
        if engine is None:
            return None
        entry = engine.gone(id, now_s)
        self.promises.changed(engine, now_s)
        self._count_sharer(engine, now_s)
        return None if entry is None else entry.request

    def attempt_lost(self, id: RequestId, now_s: float) -> Request | None:
        """As :meth:`left`, also when its engine is gone already."""
        return self._orphans.pop(id, None) or self.left(id, now_s)

    # --- time ---

    def token_s(self, model: ModelName) -> float:
        """Seconds of device time for one prompt token of an active model."""
        return self._serving[model].speed.seconds(1)

    def prefill_s(self, request: Request) -> float:
        """Seconds of device time to prefill a request of an active model."""
        return self._serving[request.model].speed.seconds(request.prefill_tokens)

    def accepted_s(self) -> float:
        """Prefill work that the engines have taken and not finished."""
        return sum([e.speed.seconds(e.backlog_tokens) for e in self._engines.values() if e.no_token_yet])

    def work_s(self, waiting: Iterable[tuple[ModelName, int]]) -> float:
        """Prefill work that is accepted or waits, in prompt tokens by model."""
        waiting_s = sum(self._serving[model].speed.seconds(tokens) for model, tokens in waiting)
        return self.accepted_s() + waiting_s

    # --- inside ---

    def _orphan(self, engine: EngineState, now_s: float) -> None:
        self._count_sharer(engine, now_s, gone=True)
        self.promises.changed(engine, now_s, gone=True)
        for id, entry in engine.in_flight.items():
            del self._engine_of[id]
            self._orphans[id] = entry.request

    def _count_sharer(self, engine: EngineState, now_s: float, gone: bool = False) -> None:
        """Keep the shared clock's number of engines that prefill."""
        shares = engine.no_token_yet > 0 and not gone
        if shares != engine.shares_device:
            engine.shares_device = shares
            self._clock.advance(now_s)
            self._clock.sharers += 1 if shares else -1
