"""What the scheduler of a device knows about the device's memory: what a request may take now, and who lacks some."""

from __future__ import annotations

from prism.core.device_events import MemoryReport
from prism.scheduler.gpu_engine import EngineState
from prism.scheduler.gpu_engines import DeviceEngines
from prism.scheduler.shortage import Shortage


class MemoryBudget:
    """Owned by one :class:`prism.scheduler.gpu.GpuScheduler`. Before the first report nothing is known to be scarce."""

    def __init__(self, engines: DeviceEngines) -> None:
        self._engines = engines
        self._free_bytes: int | None = None
        self._wanted_bytes = 0
        self._blocked_slo_s: float | None = None
        """The tightest objective of the requests that could start at once and lack memory; None: no request does."""
        self.shortage = Shortage()

    def take_report(self, report: MemoryReport) -> None:
        """The memory of the device was measured."""
        self._free_bytes, self._wanted_bytes = report.free_bytes, report.wanted_bytes
        for engine in self._engines:
            engine.settle_claims()

    def spendable_bytes(self) -> float:
        """Free device memory less what dispatched requests will still take and a reserve for running ones to grow."""
        if self._free_bytes is None:
            return float("inf")
        taken = 0
        for engine in self._engines:
            if not engine.in_flight:
                continue
            grow_bytes = max(0, engine.growth_tokens - max(0, engine.spare_tokens())) * engine.up.kv_bytes_per_token
            taken += engine.device_claim_bytes() + (grow_bytes if engine.up.elastic else 0)
        return max(0, self._free_bytes - taken)

    def room_tokens(self, engine: EngineState) -> int:
        """Tokens of one request that the engine has room for while nothing runs on the device."""
        room = max(0, engine.spare_tokens())
        if engine.up.elastic and self._free_bytes is not None:
            room += self._free_bytes // max(1, engine.up.kv_bytes_per_token)
        return room

    # --- who lacks some ---

    def none_blocked(self) -> None:
        """No request is known to lack memory; those that do are told with :meth:`note_blocked`."""
        self._blocked_slo_s = None

    def note_blocked(self, slo_ttft_s: float) -> None:
        """A request could start at once and lacks memory."""
        self._blocked_slo_s = min(slo_ttft_s, self._blocked_slo_s or float("inf"))

    def note_waiting(self, now_s: float) -> None:
        """All that happened by now is taken in: keep the shortage."""
        self.shortage.note_waiting(self._short_slo_s(), now_s)

    def _short_slo_s(self) -> float | None:
        """The tightest objective of requests that wait for memory, here or in their engines; None: no request does."""
        if not self._wanted_bytes:
            return self._blocked_slo_s
        begun = (next(iter(e.in_flight.values())).request.slo_ttft_s for e in self._engines if e.in_flight)
        return min(begun, default=self._blocked_slo_s)
