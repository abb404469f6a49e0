"""One engine's time on the compute of its devices: work that is done at whatever rate the pools give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prism.sim.queue import EventQueue
from prism.sim.roofline import Load
from prism.sim.sharing import Pool


class Stint:
    """``work_s`` seconds of work (as if alone), of which :meth:`done_s` are done; rings when all is."""

    __slots__ = ("_alarm", "_done_s", "_mark_s", "_pools", "_queue", "_rate", "_shares", "load", "work_s")

    def __init__(self, queue: EventQueue, pools: tuple[Pool, ...], on_done: Callable[[Any], None]) -> None:
        self._queue, self._pools = queue, pools
        self._shares: tuple[float, ...] = ()
        """Of the load on each pool; empty: all of it on each."""
        self._alarm = queue.alarm(on_done)
        self.load: Load | None = None
        """What the pools were told; None: resting."""
        self.work_s = 0.0
        self._done_s = self._mark_s = 0.0
        self._rate = 1.0

    def begin(self, work_s: float, load: Load) -> None:
        """Do ``work_s`` from now on, with ``load`` (the same object as before: nothing changes for the pools)."""
        if load is not self.load:
            self.load = load
            if self._shares:
                self._share_out(load)
            else:
                for pool in self._pools:
                    pool.set_load(self, load)
        self.work_s, self._done_s, self._mark_s = work_s, 0.0, self._queue.now_s
        self._rate = self._pool_rate()
        self._set_alarm()

    def use(self, pools: tuple[Pool, ...], shares: tuple[float, ...] = ()) -> None:
        """From the next :meth:`begin` on the work lies on ``pools``, each with its part of ``shares`` (none said: all
        of it on each, as with tensor parallelism). Only between two pieces of work."""
        if (pools, shares) != (self._pools, self._shares):
            self.rest()
            self._pools, self._shares = pools, shares

    def _share_out(self, load: Load) -> None:
        for pool, share in zip(self._pools, self._shares, strict=True):
            pool.set_load(self, Load(load.compute * share, load.memory * share))

    def shorten(self, work_s: float) -> None:
        """The work in progress is ``work_s`` in all."""
        self._settle()
        self.work_s = work_s
        self._set_alarm()

    def rest(self) -> None:
        """Stop at once; the pools are free of this engine."""
        self._alarm.clear()
        if self.load is not None:
            self.load = None
            for pool in self._pools:
                pool.set_load(self, None)

    def done_s(self) -> float:
        """Work done so far."""
        return self._done_s + (self._queue.now_s - self._mark_s) * self._rate

    def speed_changed(self) -> None:
        """A pool's rate is another from now on."""
        rate = self._pool_rate()
        if rate != self._rate:
            self._settle()
            self._rate = rate
            self._set_alarm()

    def _pool_rate(self) -> float:
        pools = self._pools
        return pools[0].rate if len(pools) == 1 else min(pool.rate for pool in pools)

    def _settle(self) -> None:
        self._done_s = self.done_s()
        self._mark_s = self._queue.now_s

    def _set_alarm(self) -> None:
        if self._rate > 0.0:
            self._alarm.set(self._mark_s + (self.work_s - self._done_s) / self._rate)
        else:
            self._alarm.clear()
