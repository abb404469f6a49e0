"""Answers go on to the next peer while the engine computes, and only then is another thread at its links."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_patches.remote_relay import Relay
from sglang_patches.remote_stages import Passing, Stages
from tests.patience import PATIENCE_S


class NewsHub:
    """Connections of which something comes when :attr:`news` is set."""

    reachable = True

    def __init__(self) -> None:
        self.news = threading.Event()

    def await_news(self, timeout_s: float) -> bool:
        return self.news.wait(timeout_s)


class Passed:
    """Counts, and takes the news."""

    def __init__(self, hub: NewsHub) -> None:
        self.hub, self.count, self.again = hub, 0, threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> None:
        self.hub.news.clear()
        self.count += 1
        self.again.set()
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        assert self.again.wait(PATIENCE_S), "nothing was passed on"
        self.again.clear()


@pytest.fixture
def hub() -> NewsHub:
    return NewsHub()


@pytest.fixture
def passed(hub: NewsHub) -> Passed:
    return Passed(hub)


@pytest.fixture
def relay(hub: NewsHub, passed: Passed) -> Iterator[Relay]:
    made = Relay(hub, passed)  # type: ignore[arg-type]
    yield made
    made.close()
    assert not [t for t in threading.enumerate() if t.name == "layers-relay"]


def test_what_comes_while_it_computes_is_passed_on_and_what_comes_before_is_the_engines(
    relay: Relay, hub: NewsHub, passed: Passed
) -> None:
    for _ in range(20):
        hub.news.set()
        count = passed.count
        with relay.computing():
            passed.wait()
            hub.news.set()
            passed.wait()
        hub.news.set()
        assert passed.count == count + 2, "the engine has its links back"


def test_an_engine_without_connections_has_no_thread(hub: NewsHub, passed: Passed) -> None:
    hub.reachable = False
    relay = Relay(hub, passed)  # type: ignore[arg-type]
    hub.news.set()
    with relay.computing():
        assert not [t for t in threading.enumerate() if t.name == "layers-relay"]
    relay.close()
    assert not passed.count


def test_what_breaks_in_it_leaves_the_engine_as_it_was_before(relay: Relay, hub: NewsHub, passed: Passed) -> None:
    passed.error = ValueError("broken")
    hub.news.set()
    with relay.computing():
        passed.wait()
    hub.news.set()
    with relay.computing():
        pass
    assert passed.count == 1


def test_a_part_goes_over_all_peers_while_another_one_is_computed_here() -> None:
    """It would have waited at the first of them for the end of that step."""
    answers: dict[tuple[str, str], str] = {}
    asked: list[tuple[str, str]] = []

    def send(stop: str, part: str, state: str | None) -> tuple[str, str]:
        asked.append((stop, part))
        return stop, part

    def run_here(stop: str, part: str, state: str | None) -> str:
        if part == "b":
            for there in ("p", "q"):
                answers[there, "a"] = f"behind {there}"
                assert passing.pass_on()
            assert not passing.pass_on() and asked[-1] == ("q", "a"), "the last stop is here, and computes"
        return f"{part} behind {stop}"

    stages: Stages[Any, Any, Any, Any] = Stages(
        lambda stop: stop in ("first", "last"),
        run_here,
        send,
        lambda stop, part, question: answers.get(question),
        lambda waits, since_s: None,
    )
    passing: Passing[Any, Any, Any, Any] = Passing(["first", "p", "q", "last"], stages)
    passing.add(["a"])
    assert passing.advance() and not passing.advance() and asked == [("p", "a")]
    passing.add(["b"])
    assert passing.advance() and passing.advance() and passing.passed(1)
    assert passing.take(1) == ["a behind last"]
