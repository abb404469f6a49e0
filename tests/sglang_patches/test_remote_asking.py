"""What a leader finds out about a link when it greets a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from prism.remote.messages import Measured, MeasureLink, PeerWelcome
from sglang_patches import remote_asking
from sglang_patches.remote_asking import PeerAsking
from sglang_patches.remote_peer import MEASURED_BYTES
from sglang_patches.remote_stops import TOLD_BYTES, RoutePeer


class TimedLink:
    """A peer that looks at messages every ``step_s``, behind a link of ``bytes_s``, on a clock of its own."""

    def __init__(self, bytes_s: float, step_s: float) -> None:
        self._bytes_s, self._step_s = bytes_s, step_s
        self.now_s, self.sent, self.steps = 0.0, list[int](), 0
        self._unseen: list[Any] = []

    def send(self, link: object, message: Any, batch: int, tensors: object) -> Any:
        self._unseen.append(message)
        return message

    def wait_for(self, message: Any, limit_s: float) -> Any:
        if message in self._unseen:
            self._unseen.clear()
            self.steps += 1
            self.now_s += self._step_s
        if not isinstance(message, MeasureLink):
            return SimpleNamespace(message=PeerWelcome(version=remote_asking.VERSION, engine="b", pieces=[0, 1]))
        self.sent.append(message.nbytes)
        self.now_s += message.nbytes / self._bytes_s
        return SimpleNamespace(message=Measured(batch=message.batch))


@pytest.mark.parametrize(
    ("bytes_s", "sizes"),
    [(1e9, [0, TOLD_BYTES, 0, MEASURED_BYTES]), (0.75e6, [0, TOLD_BYTES]), (12.5e6, [0, TOLD_BYTES])],
)
def test_a_slow_link_is_measured_with_little(monkeypatch: pytest.MonkeyPatch, bytes_s: float, sizes: list[int]) -> None:
    """At 6 Mbit/s the large measurement alone would take 1.4 s, in which no request goes on."""
    link = TimedLink(bytes_s, step_s=0.4)
    monkeypatch.setattr(remote_asking, "time", SimpleNamespace(monotonic=lambda: link.now_s))
    asking, peer = PeerAsking(None, lambda timeout_s: None, None), RoutePeer(SimpleNamespace())  # type: ignore[arg-type]
    asking.questions = link  # type: ignore[assignment]
    assert asking.welcomed(asking.greet(peer, "a", "m", 10), 10.0) == {0, 1}
    assert link.sent == sizes
    assert peer.rate.fixed_s == pytest.approx(0.4) and peer.rate.bytes_s == pytest.approx(bytes_s / 2, rel=0.01)
    assert link.steps == len(sizes) // 2, "who it is and what little measures the link are asked at once"
