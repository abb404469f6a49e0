"""Metrics of weights between machines, from the agents' reports: the controller sees every link of the fleet."""

from __future__ import annotations

from prism.obs import names
from prism.obs.metrics import Metrics
from prism.wire.messages import AgentReport
from prism.wire.reports import ArrivalReport

Link = tuple[str, str, str]
"""Session, sending node, receiving node."""


class Transfers:
    """:meth:`on_report` with every report, in any order of nodes."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._seen: dict[Link, tuple[int, int, float]] = {}
        self._sessions: dict[str, set[str]] = {}
        """By node: the sessions of its last report."""
        self._ended: set[tuple[str, str]] = set()

    def on_report(self, report: AgentReport) -> None:
        """Counts what came since the node's last report."""
        for arrival in report.arriving:
            self._count(report.node, arrival)
        now = {a.session for a in report.arriving}
        for gone in self._sessions.get(report.node, set()) - now:
            self._seen = {link: seen for link, seen in self._seen.items() if link[0] != gone or link[2] != report.node}
            self._ended.discard((gone, report.node))
        self._sessions[report.node] = now

    def _count(self, node: str, arrival: ArrivalReport) -> None:
        for source, (pieces, nbytes, took_s) in arrival.sources.items():
            link = (arrival.session, source, node)
            had_pieces, had_bytes, had_s = self._seen.get(link, (0, 0, 0.0))
            self._seen[link] = (pieces, nbytes, took_s)
            labels = {"source": source, "node": node}
            if pieces > had_pieces:
                self._metrics.inc(names.WEIGHT_BLOCKS, pieces - had_pieces, **labels)
                self._metrics.inc(names.WEIGHT_BYTES, nbytes - had_bytes, **labels)
            if took_s > had_s:
                self._metrics.set(names.LINK_RATE, (nbytes - had_bytes) / (took_s - had_s), **labels)
        end = (arrival.session, node)
        if (arrival.took_s is not None or arrival.error) and end not in self._ended:
            self._ended.add(end)
            self._metrics.inc(names.WEIGHT_ARRIVALS, node=node, outcome="failed" if arrival.error else "ok")
