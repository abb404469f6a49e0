"""Who may begin on a device without breaking what was promised to those that run (:mod:`prism.policy.promises`), by
what their steps take as it is learned from answers that end."""

from __future__ import annotations

import math
from typing import Final

from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.specs import DeviceKind, Prefer
from prism.policy.device_time import GUESSES, slowdown, step_of
from prism.policy.promises import Decoder, Entrant, may_begin
from prism.scheduler.gpu_engine import EndedAnswer, EngineState

_LEARN: Final = 0.1
"""Part of an answer's logarithmic error that its engine's correction takes over."""
_MOST: Final = math.log(8.0)
_MOST_DONE: Final = 0.8
"""Of a request as long as most there is always something left."""
_TOO_SLOW_ANYWAY: Final = 2.0
"""What misses its objective alone begins where steps take no longer than so many times what they take alone."""
_LOST: Final = 0.5
"""Steps would have to be so much faster than alone: nothing that others do will save it."""
_LEAD_SHARE: Final = 0.1
"""Part of its objective before which a request can wait no longer, beside its prefill."""


class Promises:
    """Of one device; ``pauses``: its engines stand still for each other. Owns the clock of undisturbed time and what
    was learned of steps; engines keep their factors."""

    def __init__(self, kind: DeviceKind, pauses: bool = False) -> None:
        self._rates, self._pauses = GUESSES[kind], pauses
        self._crowd = 1.0
        self._at_s = 0.0
        self._clock_s = 0.0
        self._running: dict[InstanceKey, tuple[EngineState, float, float]] = {}
        """Engines that run something, with their shares and what their steps take alone by the roofline."""
        self.version = 0
        """Counts what changes answers, the time aside."""
        self._decoders: dict[InstanceKey, Decoder] = {}
        """Those that run something, as of :attr:`_decoders_at`: time and version."""
        self._decoders_at = 0.0, 0

    # --- what happens ---

    def clock_s(self, now_s: float) -> float:
        """Seconds of undisturbed steps that an engine which ran all the time would have made."""
        if now_s > self._at_s:
            self._clock_s += (now_s - self._at_s) / self._crowd
            self._at_s = now_s
        return self._clock_s

    def changed(self, engine: EngineState, now_s: float, gone: bool = False) -> None:
        """Requests came to the engine, or left it; ``gone``: it is no more."""
        self.clock_s(now_s)
        self.version += 1
        if engine.in_flight and not gone:
            self._running[engine.up.key] = engine, *self._step(engine, 0, 0)
        else:
            self._running.pop(engine.up.key, None)
        self._crowd = slowdown(sum([share for _, share, _ in self._running.values()]))

    def answered(self) -> None:
        """A request of an engine has its first token."""
        self.version += 1

    def learn(self, engine: EngineState, answer: EndedAnswer, now_s: float) -> None:
        """An answer of the engine ended."""
        undisturbed_s = self.clock_s(now_s) - answer.undisturbed_s
        if undisturbed_s <= 0.0:
            return
        said_s, _ = self.alone_step(engine)
        error = math.log(undisturbed_s / answer.tokens / said_s)
        self.version += 1
        engine.log_factor = min(_MOST, max(-_MOST, engine.log_factor + _LEARN * error))

    # --- questions ---

    def runs_alone(self, engine: EngineState) -> bool:
        """No other engine runs anything."""
        return not self._running or (len(self._running) == 1 and engine.up.key in self._running)

    def step_s(self, engine: EngineState) -> float:
        """What a decode step of the engine, which runs something, takes beside the others that do."""
        return self.alone_step(engine)[0] * self._crowd

    def alone_step(self, engine: EngineState) -> tuple[float, float]:
        """Seconds that a decode step of the engine, which runs something, takes alone, and its share of the bandwidth
        in it."""
        _, share, step_s = self._running[engine.up.key]
        return math.exp(engine.log_factor) * step_s, share

    def answering_shares(self) -> list[float]:
        """Of the bandwidth, of the engines that answer; none where all that run something have enough of it."""
        if self._crowd <= 1.0:
            return []
        return [share for engine, share, _ in self._running.values() if engine.answering]

    def latest_s(self, request: Request, before_s: float) -> float:
        """From when on the request cannot wait without missing its first token, ``before_s`` (its own prefill included)
        being prefilled before it comes."""
        return request.deadline_s - before_s - _LEAD_SHARE * request.slo_ttft_s

    def may_begin(
        self, engine: EngineState, request: Request, in_time: int, can_wait: bool, followed: bool, now_s: float
    ) -> bool:
        """Whether the request may go to its engine now. ``in_time``: so many of its model's waiting requests could be
        in time if it does. ``followed``: requests of other models wait too."""
        if not self._running or math.isinf(engine.up.slo_tpot_s):
            return True  # nothing runs, or nobody minds
        running = self._running_decoders(now_s)
        was = running.get(engine.up.key)
        others = [decoder for decoder in running.values() if decoder is not was]
        share, step_s = self._step(engine, request.kv_tokens, 1)
        alone_s = math.exp(engine.log_factor) * step_s
        gain = in_time if engine.up.prefer is Prefer.TTFT or engine.up.slo_tpot_s >= alone_s else 0
        with_it = self._decoder(engine, share, alone_s, 0.0, now_s)
        entrant = Entrant(with_it, was, gain, can_wait, followed)
        return may_begin(entrant, others)

    def _running_decoders(self, now_s: float) -> dict[InstanceKey, Decoder]:
        if self._decoders_at != (now_s, self.version):
            self._decoders_at = now_s, self.version
            self._decoders = {key: self._as_it_runs(*running, now_s) for key, running in self._running.items()}
        return self._decoders

    def _as_it_runs(self, engine: EngineState, share: float, step_s: float, now_s: float) -> Decoder:
        ran_s = now_s - engine.began_sum_s / len(engine.in_flight)
        done = min(_MOST_DONE, ran_s / engine.pace.answer_s)
        return self._decoder(engine, share, math.exp(engine.log_factor) * step_s, done, now_s)

    def _decoder(self, engine: EngineState, share: float, alone_s: float, done: float, now_s: float) -> Decoder:
        """An engine whose steps take ``alone_s`` alone, and whose requests have come so far (0..1)."""
        bearable, promised, pace = engine.up.slo_tpot_s / alone_s, engine.promised, engine.pace
        if engine.up.prefer is Prefer.TTFT:
            bearable, promised = math.inf, 0
        elif bearable < 1.0:
            bearable, promised = _TOO_SLOW_ANYWAY, 0
        elif done:
            crowd = engine.disturbed(self.clock_s(now_s), now_s) or self._crowd
            ahead = max(_LOST, (bearable - done * crowd) / (1.0 - done))
            bearable += (ahead - bearable) * math.exp(-pace.fed(now_s))
        rest_s = pace.answer_s * (1.0 - done)
        yields = self._pauses and engine.up.stands_still
        return Decoder(share, bearable, promised, rest_s, pace.lasts_s(rest_s, now_s), yields)

    def _step(self, engine: EngineState, more_tokens: int, more: int) -> tuple[float, float]:
        """The share of the bandwidth and the seconds of a step alone, by the roofline, with so many requests more."""
        up, sequences = engine.up, len(engine.in_flight) + more
        read_bytes = up.weight_bytes + (engine.held_tokens + more_tokens) * up.kv_bytes_per_token
        step_s, share = step_of(up.rates or self._rates, read_bytes, max(1, sequences))
        return share, step_s
