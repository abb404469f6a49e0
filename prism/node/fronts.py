"""What an agent asks front doors, and how it notices that one is dead: the supervisor that saw it end says so in the
store; where nobody saw it, its silence does.

A question (:class:`~prism.wire.messages.ResumeQuery` or :class:`~prism.wire.messages.Finish`) is repeated until it is
answered or its front door is dead; a dead front door's answer is "I know no such request", since its clients are gone
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from prism.store.values import FRONT_DEAD
from prism.wire.mailbox import Outbox
from prism.wire.messages import Finish, ResumeQuery, ResumeReply

REPEAT_S: Final = 0.5
DEAD_AFTER_S: Final = 60.0
"""A front door announces itself every second. One that was silent for this long is taken for dead. Its supervisor says
at once when it ends, so this finds dead machines only, and may be longer than any burst of requests or lack of
processors keeps a living one silent: its clients would lose their answers."""


@dataclass(slots=True)
class _Question:
    front: str
    message: ResumeQuery | Finish
    asked_s: float
    sent_s: float


class Fronts:
    """Pending questions and liveness of front doors. One loop uses it; the owner calls :meth:`tick` a few times a
    second."""

    def __init__(self, outbox: Outbox, on_reply: Callable[[ResumeReply], None]) -> None:
        self._outbox = outbox
        self._on_reply = on_reply
        self._pending: dict[str, _Question] = {}
        self._seen_s: dict[str, float] = {}
        self._refreshed_s = 0.0
        self._sighted_s = 0.0

    def ask(self, front: str, message: ResumeQuery | Finish, now_s: float) -> None:
        """Sends ``message``; :attr:`on_reply` gets the answer later, from :meth:`answer` or :meth:`tick`."""
        self._pending[message.id] = _Question(front, message, now_s, now_s)
        self._outbox.send(front, message)

    def answer(self, reply: ResumeReply) -> None:
        """A front door's answer; an answer nobody waits for is dropped."""
        if self._pending.pop(reply.id, None) is not None:
            self._on_reply(reply)

    def forget(self, request_id: str) -> None:
        self._pending.pop(request_id, None)

    def refresh(self, seen_s: Mapping[str, float], now_s: float) -> None:
        """The announcements in the store: mailbox address -> Unix time. Call it every second: after a pause (the store
        was away) nobody is declared dead before they had time to announce themselves again."""
        if now_s - self._refreshed_s > DEAD_AFTER_S / 2:
            self._sighted_s = now_s
        self._refreshed_s = now_s
        dead = {front for front in seen_s if seen_s[front] == FRONT_DEAD and self._seen_s.get(front) != FRONT_DEAD}
        for front in dead | (self._seen_s.keys() - seen_s.keys()):
            self._outbox.forget(front)
        self._seen_s = dict(seen_s)

    def is_dead(self, front: str, now_s: float, since_s: float) -> bool:
        """Whether the end of ``front`` was seen, or it has been silent for :data:`DEAD_AFTER_S`, counting from
        ``since_s`` if it never spoke."""
        if self._seen_s.get(front) == FRONT_DEAD:
            return True
        return now_s - max(self._seen_s.get(front, 0.0), since_s, self._sighted_s) > DEAD_AFTER_S

    def tick(self, now_s: float) -> None:
        """Repeats what was not answered and answers for the dead."""
        for request_id, question in list(self._pending.items()):
            if self.is_dead(question.front, now_s, question.asked_s):
                self.answer(ResumeReply(id=request_id, known=False))
            elif now_s - question.sent_s >= REPEAT_S:
                question.sent_s = now_s
                self._outbox.send(question.front, question.message)
