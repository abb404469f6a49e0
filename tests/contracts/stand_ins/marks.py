"""Marks the collected tests by the suite's list and writes how each ended, for :mod:`tests.contracts.run`."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest


class Marks:
    """``rules`` has ``not_applicable`` and ``differs``: patterns of test ids, each with the reason.

    A test that does not apply is not run. One that differs is run and must fail, so that the list stays true.
    """

    def __init__(self, rules: dict[str, dict[str, str]], results: Path) -> None:
        self._rules = rules
        self._results = results
        self._ends: dict[str, dict[str, str]] = {}
        self._matched: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for pattern, reason in self._matching(item.nodeid, "not_applicable"):
                item.add_marker(pytest.mark.skip(reason=reason))
                self._matched.add(pattern)
            for pattern, reason in self._matching(item.nodeid, "differs"):
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                self._matched.add(pattern)

    def _matching(self, test: str, rule: str) -> list[tuple[str, str]]:
        """Not :func:`fnmatch.fnmatchcase` on the id as it is: its brackets are part of a name, not a choice."""
        plain = test.replace("[", "(").replace("]", ")")
        return [pair for pair in self._rules.get(rule, {}).items() if fnmatchcase(plain, pair[0])]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self._ends[report.nodeid] = {"end": _end(report), "reason": _reason(report)}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._ends[report.nodeid] = {"end": "failed", "reason": _last_line(str(report.longrepr))}

    def pytest_sessionfinish(self) -> None:
        patterns = {p for rule in ("not_applicable", "differs") for p in self._rules.get(rule, {})}
        stale = sorted(patterns - self._matched)
        self._results.write_text(json.dumps({"tests": self._ends, "stale": stale}))


def _end(report: pytest.TestReport) -> str:
    if report.skipped:
        return "differs" if hasattr(report, "wasxfail") else "not applicable"
    return "passed" if report.passed else "failed"


def _reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail)
    details: Any = report.longrepr
    if isinstance(details, tuple):
        return str(details[2]).removeprefix("Skipped: ")
    crash = getattr(details, "reprcrash", None)
    return _last_line(crash.message if crash else str(details)) if details else ""


def _last_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")[:300]
