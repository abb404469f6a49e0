"""What a leader finds out about a link when it greets a peer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prism.remote.messages import KvRows, Measured, MeasureLink, PeerHello, PeerWelcome, TensorHead
from sglang_patches import remote_asking
from sglang_patches.remote_asking import PeerAsking, WantedKv
from sglang_patches.remote_peer import MEASURED_BYTES
from sglang_patches.remote_stops import TOLD_BYTES, RoutePeer
from sglang_patches.remote_tensors import pack_tensors


class SentLink:
    closed = False

    def __init__(self, sent: list[Any]) -> None:
        self._sent = sent

    def send(self, message: Any, tensors: object) -> None:
        self._sent.append(message)


class TimedLink:
    """A peer that looks at messages every ``step_s``, behind a link of ``bytes_s``, on a clock of its own."""

    def __init__(self, bytes_s: float, step_s: float) -> None:
        self._bytes_s, self._step_s = bytes_s, step_s
        self.now_s = self.came_s = 0.0
        self.sent, self.steps = list[int](), 0
        self._unseen: list[Any] = []

    def send(self, link: object, message: Any, batch: int, tensors: object) -> Any:
        self._unseen.append(message)
        return message

    def wait_for(self, message: Any, limit_s: float) -> Any:
        if message in self._unseen:
            self._unseen.clear()
            self.steps += 1
            self.now_s += self._step_s
        self.came_s = self.now_s
        if not isinstance(message, MeasureLink):
            return SimpleNamespace(message=PeerWelcome(version=remote_asking.VERSION, engine="b", pieces=[0, 1]))
        self.sent.append(message.nbytes)
        self.now_s += message.nbytes / self._bytes_s
        self.came_s = self.now_s
        return SimpleNamespace(message=Measured(batch=message.batch))


@pytest.mark.parametrize("welcome", [True, False])
def test_who_was_greeted_ahead_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, welcome: bool) -> None:
    """The answer would wait for the step that the peer is in, and what measures the link take several round trips more,
    beside weights that come over it."""
    monkeypatch.setattr(remote_asking, "_SLOW_S", -1.0)
    sent: list[Any] = []
    link: Any = SentLink(sent)
    asking, peer = PeerAsking(None, lambda timeout_s: None, None, range), RoutePeer(link)  # type: ignore[arg-type]
    asking.greet_ahead(peer, "a", "m", 10)
    _hello, *measuring = sent
    for message in measuring:
        asking.take(link, SimpleNamespace(message=Measured(batch=message.batch)))  # type: ignore[arg-type]
    if not welcome:
        assert not asking.greet(peer, "a", "m", 10).ahead and len(sent) == 6, "it has not answered yet"
        return
    welcomed = PeerWelcome(version=remote_asking.VERSION, engine="b", pieces=[0, 1])
    asking.take(link, SimpleNamespace(message=welcomed))  # type: ignore[arg-type]
    greeting = asking.greet(peer, "a", "m", 10)
    assert greeting.ahead and greeting.measured == tuple((link, message.batch) for message in measuring)
    assert asking.welcomed(greeting, 0.0) == {0, 1} and peer.name == "b"
    assert [type(message) for message in sent[:3]] == [PeerHello, MeasureLink, MeasureLink]
    assert len(sent) == 3
    sent.clear()
    assert not asking.greet(peer, "a", "m", 10).ahead
    assert [type(message) for message in sent] == [PeerHello, MeasureLink, MeasureLink], "once only"


@pytest.mark.parametrize(
    ("bytes_s", "sizes"),
    [(1e9, [0, TOLD_BYTES, 0, MEASURED_BYTES]), (0.75e6, [0, TOLD_BYTES]), (12.5e6, [0, TOLD_BYTES])],
)
def test_a_slow_link_is_measured_with_little(monkeypatch: pytest.MonkeyPatch, bytes_s: float, sizes: list[int]) -> None:
    """At 6 Mbit/s the large measurement alone would take 1.4 s, in which no request goes on."""
    link = TimedLink(bytes_s, step_s=0.4)
    monkeypatch.setattr(remote_asking, "time", SimpleNamespace(monotonic=lambda: link.now_s))
    asking, peer = PeerAsking(None, lambda timeout_s: None, None, range), RoutePeer(SentLink([]))  # type: ignore[arg-type]
    asking.questions = link  # type: ignore[assignment]
    assert asking.welcomed(asking.greet(peer, "a", "m", 10), 10.0) == {0, 1}
    assert link.sent == sizes
    assert peer.rate.fixed_s == pytest.approx(0.4) and peer.rate.bytes_s == pytest.approx(bytes_s / 2, rel=0.01)
    assert link.steps == len(sizes) // 2, "who it is and what little measures the link are asked at once"


class BusyLinks:
    """Peers that answer when their step ends, on a clock of their own; each message is seen at the end of one."""

    def __init__(self, steps_s: dict[str, float]) -> None:
        self._steps_s, self.now_s, self.came_s = steps_s, 0.0, 0.0
        self._asked: dict[str, float] = {}

    def send(self, link: str, message: Any, batch: int, tensors: object) -> Any:
        step_s = self._steps_s[link]
        self._asked[link] = (self.now_s // step_s + 1) * step_s
        return link, message

    def wait_for(self, question: Any, limit_s: float) -> Any:
        link, message = question
        self.came_s = self._asked[link]
        self.now_s = max(self.now_s, self.came_s)
        rows = torch.full((message.end_layer - message.first_layer, len(message.slots), 1, 2), self._steps_s[link])
        packed = pack_tensors([rows, rows])
        tensors = [(TensorHead(dtype, list(shape), data.nbytes), data) for dtype, shape, data in packed]
        return SimpleNamespace(message=KvRows(batch=message.batch), tensors=tensors)


def kv_of(peers: list[RoutePeer], links: BusyLinks) -> list[Any]:
    ranks = SimpleNamespace(world=1, together=lambda do: do(), own=lambda tensor, dim: tensor)
    pool = SimpleNamespace(head_num=1, head_dim=2, v_head_dim=2, store_dtype=torch.float32)
    runner = SimpleNamespace(device="cpu", token_to_kv_pool=pool)
    asking = PeerAsking(runner, lambda timeout_s: None, ranks, range)  # type: ignore[arg-type]
    asking.questions = links  # type: ignore[assignment]
    return asking.fetch([WantedKv(peer, range(2 * i, 2 * i + 2)) for i, peer in enumerate(peers)], [3, 4])


def test_peers_are_asked_for_kv_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other three would take 0.5 + 0.5 + 0.5 s: each looks at messages between two of its steps."""
    links = BusyLinks({"a": 0.4, "b": 0.5, "c": 0.3})
    peers = [RoutePeer(link) for link in "abc"]  # type: ignore[arg-type]
    monkeypatch.setattr(remote_asking, "time", SimpleNamespace(monotonic=lambda: links.now_s))
    found = kv_of(peers, links)
    assert links.now_s == 0.5, "as long as the slowest of them"
    assert [float(k[0, 0, 0, 0]) for k, _ in found] == pytest.approx([0.4, 0.5, 0.3])
    assert all(tuple(k.shape) == tuple(v.shape) == (2, 2, 1, 2) for k, v in found)
