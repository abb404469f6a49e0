"""The sending process: ``python -m prism.trace.replay.sender PLAN.json OUT.jsonl``.

Speaks JSON lines. On stdout: ``{"ready": ...}`` when prompts are prepared; after a line on stdin ``{"started": ...}``,
``{"progress": ...}`` twice a second, at the end ``{"finished": ...}``; or ``{"failed": "..."}``. The end of its stdin
(its parent died) or SIGINT/SIGTERM stops it: what is under way is cancelled and recorded as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from time import perf_counter, time
from typing import Any, Final

import msgspec
import uvloop

from prism.core.errors import PrismError
from prism.trace.files import open_trace
from prism.trace.replay.flight import Flight
from prism.trace.replay.http import HttpPool, Target
from prism.trace.replay.output import RecordWriter, Segment, finished_rows
from prism.trace.replay.pacer import Pacer
from prism.trace.replay.plan import API_KEY_VARIABLE, SendPlan
from prism.trace.replay.requests import Prepared, RequestFactory
from prism.trace.report import RequestRecord
from prism.trace.steps import apply_steps

LEAD_S: Final = 0.2
"""Between the go and the first due time."""
PROGRESS_S: Final = 0.5


class Sender:
    """Sends the plan's requests and writes a record for each."""

    def __init__(self, plan: SendPlan, writer: RecordWriter, requests: RequestFactory, done: frozenset[int]) -> None:
        self._plan, self._writer, self._done = plan, writer, done
        self._pool = HttpPool(Target.of(plan.url), plan.most_connections)
        self._flights: dict[Flight, None] = {}
        self._landed = asyncio.Event()
        self._first_due_s = self._first_missing_due_s()
        rows = apply_steps(open_trace(plan.trace).rows(), plan.steps)
        self._pacer = Pacer(requests.prepared(rows, self._first_due_s, done), self._send)
        self._zero_s = 0.0
        self.sent = self.ended = self.met_ttft = self.met_tpot = 0
        self.errors: Counter[str] = Counter()
        self._lags: list[float] = []
        self._ttfts: list[float] = []

    async def run(self) -> dict[str, Any]:
        """Send everything, wait for all answers; returns the final progress."""
        self._pacer.prefill()
        segment = Segment(time() + LEAD_S, self._first_due_s, len(self._done))
        self._writer.segment(segment)
        self._zero_s = perf_counter() + LEAD_S
        self._pacer.start(self._zero_s)
        _say({"started": segment.started_unix_s, "first_due_s": self._first_due_s})
        ticker = asyncio.create_task(self._tick())
        try:
            await self._pacer.finished
            if self._flights:
                await self._landed.wait()
        finally:
            ticker.cancel()
            self._pool.close()
            self._writer.close()
        return self._progress()

    def stop(self) -> None:
        """Send nothing more and cancel what is under way."""
        self._pacer.stop()
        self._pool.close()

    def _first_missing_due_s(self) -> float:
        if not self._done:
            return 0.0
        rows = apply_steps(open_trace(self._plan.trace).rows(), self._plan.steps)
        return next((row.arrival_s for index, row in enumerate(rows) if index not in self._done), 0.0)

    def _send(self, request: Prepared) -> None:
        flight = Flight(request, self._zero_s, self._plan.keep_gaps, self._on_done)
        self.sent += 1
        self._flights[flight] = None
        self._pool.send(request.data, flight)

    def _on_done(self, flight: Flight, record: RequestRecord) -> None:
        if self._flights.pop(flight, flight) is flight:
            return
        if not self._flights and self._pacer.finished.done():
            self._landed.set()
        self.ended += 1
        if record.error:
            self.errors[record.error] += 1
        self.met_ttft += record.met_ttft()
        self.met_tpot += record.met_tpot()
        self._lags.append(record.lag_s)
        if record.ttft_s is not None:
            self._ttfts.append(record.ttft_s)
        if self._first_due_s:
            record = msgspec.structs.replace(record, arrival_s=record.arrival_s + self._first_due_s)
        self._writer.add(record)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._writer.flush()
            self._time_out()
            _say({"progress": self._progress()})

    def _time_out(self) -> None:
        oldest_s = perf_counter() - self._plan.timeout_s
        for flight in list(self._flights):
            if flight.sent_s > oldest_s:
                return
            self._pool.cancel(flight, "timeout", f"no end after {self._plan.timeout_s:g} s")

    def _progress(self) -> dict[str, Any]:
        lags, self._lags = sorted(self._lags), []
        ttfts, self._ttfts = sorted(self._ttfts), []
        return {
            "at_s": perf_counter() - self._zero_s + self._first_due_s,
            "sent": self.sent,
            "skipped": len(self._done),
            "ended": self.ended,
            "in_flight": len(self._flights),
            "errors": dict(self.errors),
            "met_ttft": self.met_ttft,
            "met_tpot": self.met_tpot,
            "lag_p99_s": lags[int(len(lags) * 0.99)] if lags else None,
            "ttft_p50_s": ttfts[len(ttfts) // 2] if ttfts else None,
            "ttft_p95_s": ttfts[int(len(ttfts) * 0.95)] if ttfts else None,
        }


async def _run(plan: SendPlan, writer: RecordWriter, factory: RequestFactory, done: frozenset[int]) -> None:
    sender = Sender(plan, writer, factory, done)
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    threading.Thread(target=_wait_for_parent, args=(loop, stopped), daemon=True).start()
    work = asyncio.create_task(sender.run())
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    interrupted = not work.done()
    if interrupted:
        sender.stop()
    stop.cancel()
    _say({"finished": {**await work, "interrupted": interrupted}})


def _wait_for_parent(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    while sys.stdin.readline():
        pass
    with contextlib.suppress(RuntimeError):  # the loop ended first
        loop.call_soon_threadsafe(stopped.set)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str]) -> int:
    """Entry of the process. Ends at once when its parent goes: a reader of stdin never blocks the exit."""
    plan_path, out = Path(argv[0]), Path(argv[1])
    _raise_file_limit()
    code = 1
    try:
        plan = msgspec.json.decode(plan_path.read_bytes(), type=SendPlan)
        gc.freeze()
        gc.set_threshold(100_000, 50, 1000)  # records and flights form no cycles; a full collection costs milliseconds
        done = finished_rows(out, plan) if out.exists() and out.stat().st_size else frozenset()
        factory = RequestFactory(plan, os.environ.get(API_KEY_VARIABLE))
        writer = RecordWriter(out, plan)
        _say({"ready": {"skipped": len(done)}})
        if sys.stdin.readline():
            uvloop.run(_run(plan, writer, factory, done))
            code = 0
    except (PrismError, OSError) as exc:
        with contextlib.suppress(OSError):  # nobody may be there to hear it
            _say({"failed": str(exc)})
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
