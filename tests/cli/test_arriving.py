"""What came to other machines is told, also when the server shows it only after the load has ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from prism.cli import arriving
from prism.cli.arriving import watched
from prism.cli.client import AdminClient
from tests.patience import PATIENCE_S

ARRIVED = {"session": "s1", "bytes_all": 100, "bytes_done": 100, "took_s": 0.5, "sources": {"a": (4, 100, 0.5)}}


class Server:
    """Answers what the server shows of a model, look by look; the last for ever."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self._looks: Iterator[dict[str, Any]] = iter(looks)
        self._last: dict[str, Any] = {}

    def get(self, _: str) -> dict[str, Any]:
        self._last = next(self._looks, self._last)
        return self._last


def shown(*nodes: str, **arriving: dict[str, Any]) -> dict[str, Any]:
    return {"replicas": [{"devices": [f"{node}/host:0"], "arriving": arriving.get(node)} for node in nodes]}


def watch(server: Server) -> None:
    with watched(cast(AdminClient, server), "m"):
        pass


def test_arrivals_are_told_late(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "LATE_S", PATIENCE_S)
    watch(Server(shown("a"), shown("a", "b"), shown("a", "b", b=ARRIVED)))
    assert "b: 100 B in 500ms from a" in capsys.readouterr().err


def test_arrivals_of_before_are_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    watch(Server(shown("a", "b", b=ARRIVED)))
    assert "from a" not in capsys.readouterr().err
