"""What a leader has asked its peers, and their answers as they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from prism.core.errors import PrismError
from prism.remote.link import PeerLink, Received
from prism.remote.messages import Message, Refused

NAP_S: Final = 0.05


class PeerLost(PrismError):
    """A peer died, left, refused or did not answer in time: this batch has no result."""


Question = tuple[PeerLink, int]
"""Whom, and the number of what was asked."""
Pump = Callable[[float], None]
"""Takes what arrived, after waiting that long at most, and serves one piece of foreign work if there is any."""


class Questions:
    """Of one engine. Several may be open at a time; a peer answers its own in order."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._asked: set[Question] = set()
        self._answers: dict[Question, tuple[Received, float]] = {}
        self.came_s = 0.0
        """When the answer that was taken last had come."""

    def take(self, link: PeerLink, received: Received) -> None:
        """An answer; one that nobody waits for any more is dropped."""
        key = (link, getattr(received.message, "batch", 0))
        if key in self._asked:
            self._answers[key] = received, time.monotonic()

    def ask(self, link: PeerLink, message: Message, batch: int, tensors: Sequence[Any], limit_s: float) -> Received:
        """Send and wait; foreign work is served meanwhile. Raises :class:`PeerLost`."""
        return self.wait_for(self.send(link, message, batch, tensors), limit_s)

    def send(self, link: PeerLink, message: Message, batch: int, tensors: Sequence[Any]) -> Question:
        question = link, batch
        self._asked.add(question)
        link.send(message, tensors)
        return question

    def wait_for(self, question: Question, limit_s: float) -> Received:
        give_up_s = time.monotonic() + limit_s
        try:
            while (answer := self.answer(question)) is None:
                if time.monotonic() > give_up_s:
                    question[0].close(f"no answer within {limit_s:.0f} s")
                    continue
                self._pump(NAP_S)
        finally:
            self._asked.discard(question)
        return answer

    def answer(self, question: Question) -> Received | None:
        """If it is there. Raises :class:`PeerLost` when none will come, or the peer refused."""
        link = question[0]
        if (found := self._answers.pop(question, None)) is None:
            if link.closed:
                raise PeerLost(f"{link.peer}: {link.why}")
            return None
        answer, self.came_s = found
        self._asked.discard(question)
        if isinstance(answer.message, Refused):
            link.close("it refused")  # it must not be asked again, and forgets this engine's KV
            raise PeerLost(f"{link.peer} refused: {answer.message.reason}")
        return answer

    def waits(self, question: Question) -> bool:
        """Whether its answer is still to come."""
        return question in self._asked and question not in self._answers and not question[0].closed

    def answered(self, question: Question) -> bool:
        """Whether the answer is there, and nobody has taken it."""
        return question in self._answers

    def nap(self, waits: bool, give_up_s: float, most_s: float = NAP_S) -> None:
        """Take what arrived; ``waits``: after waiting for it a little, ``most_s`` at most. Whoever has not answered at
        ``give_up_s`` (``time.monotonic``) is lost."""
        if waits and time.monotonic() > give_up_s:
            for link, _ in self._asked - self._answers.keys():
                link.close("no answer in time")
        self._pump(most_s if waits else 0.0)

    def drop(self, question: Question) -> None:
        """Its answer is of no use any more."""
        self._asked.discard(question)
        self._answers.pop(question, None)

    def forget(self) -> None:
        """Answers that are still to come are of no use."""
        self._asked.clear()
        self._answers.clear()
