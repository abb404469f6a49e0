"""What happened when in a burst beside a multicast: from what its client saw and from the machines' logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from benchmarks.live.burst_client import BurstSeen


@dataclass(slots=True)
class Moments:
    """Seconds after the burst was sent."""

    begun_s: list[float]
    """First tokens, in order."""
    done_s: float
    """The last token of all."""
    failed: int
    arrived_s: list[float] = field(default_factory=list)
    """Each receiver has all its weights in memory."""
    ready_s: list[float] = field(default_factory=list)
    """Each new instance may serve."""
    routed_s: list[float] = field(default_factory=list)
    """A route over other engines was set, again and again."""
    alone_s: list[float] = field(default_factory=list)
    """Each instance that led over others has everything in its engine."""

    @property
    def first_tokens(self) -> tuple[float, float, float, float]:
        """Of the first, the median, the 90th of a hundred and the last request."""
        times_s = self.begun_s
        return times_s[0], times_s[len(times_s) // 2], times_s[int(0.9 * len(times_s))], times_s[-1]

    @property
    def begun(self) -> int:
        """Requests with a first token before the multicast has ended."""
        return sum(at_s < self.end_s for at_s in self.begun_s)

    @property
    def end_s(self) -> float:
        """Of the multicast."""
        return max(self.arrived_s)

    @staticmethod
    def head() -> str:
        columns = "first, median, p90, last, multicast's end, begun by then, ready, routed, alone, all done, failed"
        return f"| round | {columns.replace(', ', ' | ')} |\n|---|{'---|' * len(columns.split(', '))}"

    def row(self, name: str) -> str:
        several = (_range(self.ready_s), _range(self.routed_s), _range(self.alone_s))
        times = [*(f"{s:.2f}" for s in (*self.first_tokens, self.end_s)), str(self.begun)]
        return f"| {name} | {' | '.join([*times, *several])} | {self.done_s:.2f} | {self.failed} |"


def _range(times_s: Sequence[float]) -> str:
    return f"{min(times_s):.2f} to {max(times_s):.2f} ({len(times_s)})" if times_s else ""


def moments(seen: BurstSeen, logs: Iterable[Path]) -> Moments:
    """``logs``: the folders of all machines' logs."""
    answered = [stream.tokens_s for stream in seen.streams if stream.tokens_s]
    first = sorted(tokens[0] - seen.sent_s for tokens in answered)
    last_s = max(tokens[-1] for tokens in answered) - seen.sent_s
    found = Moments(first, last_s, len(seen.streams) - len(answered))
    for at_s, text in _lines(logs):
        since_s = at_s - seen.sent_s
        if since_s < -1.0:
            continue
        for what, times_s in _KINDS.items():
            if re.search(what, text):
                getattr(found, times_s).append(since_s)
    return found


_KINDS = {
    r"arrived in [\d.]+ s from": "arrived_s",
    r" is ready on ": "ready_s",
    r" leads over ": "routed_s",
    r" serves alone after ": "alone_s",
}


def _lines(logs: Iterable[Path]) -> Iterator[tuple[float, str]]:
    for folder in logs:
        for file in folder.glob("agent*.jsonl"):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                if record["logger"].startswith("prism.node"):
                    yield datetime.fromisoformat(record["ts"]).timestamp(), record["msg"]
