"""Answers to agents that ask what the client's stream has: before they run a request again, and before they acknowledge
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from prism.server.stream import RequestStream
from prism.wire.mailbox import Outbox
from prism.wire.messages import Finish, ResumeQuery, ResumeReply, TokenItem, Tokens, decode

log = logging.getLogger(__name__)

SETTLE_S: Final = 0.25
"""How long missing tokens may still be on their way when the engine says that it is done."""
BEHIND_S: Final = 0.05
"""A mailbox that holds unread messages is looked at again after this time: the tokens may be among them."""
MOST_BEHIND_S: Final = 20.0


class Resuming:
    """``take`` feeds one token item into its stream; ``behind`` says whether messages lie unread."""

    def __init__(
        self,
        streams: Mapping[str, RequestStream],
        outbox: Outbox,
        take: Callable[[TokenItem], None],
        behind: Callable[[], bool],
    ) -> None:
        self._streams, self._outbox, self._take, self._behind = streams, outbox, take, behind
        self._settling: dict[str, asyncio.TimerHandle] = {}

    def query(self, message: ResumeQuery) -> bool:
        """True when the request goes on from tokens it has."""
        stream = self._streams.get(message.id)
        if stream is None or stream.error is not None:
            self._reply(message.reply_to, ResumeReply(id=message.id, known=False))
            return False
        if stream.finished:
            self._reply(message.reply_to, ResumeReply(id=message.id, known=True, complete=True))
            return False
        attempt = stream.log.supersede()
        log.info("request runs again", extra={"request": stream.id, "attempt": attempt, "model": stream.model})
        reply = ResumeReply(id=message.id, known=True, attempt=attempt, token_ids=list(stream.log.tokens))
        self._reply(message.reply_to, reply)
        return bool(reply.token_ids)

    def finish(self, message: Finish) -> None:
        for item in _items(message.final):
            if item.id == message.id:
                self._take(item)
        if self._answered(message, settled=False) or message.id in self._settling:
            return
        loop = asyncio.get_running_loop()
        self._settling[message.id] = loop.call_later(SETTLE_S, self._settled, message, loop.time() + MOST_BEHIND_S)

    def _settled(self, message: Finish, give_up_s: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < give_up_s and message.id in self._streams and self._behind():
            self._settling[message.id] = loop.call_later(BEHIND_S, self._settled, message, give_up_s)
            return
        del self._settling[message.id]
        for item in _items(message.final):
            self._take(item)
        self._answered(message, settled=True)

    def _answered(self, message: Finish, settled: bool) -> bool:
        stream = self._streams.get(message.id)
        if stream is None or stream.error is not None:
            self._reply(message.reply_to, ResumeReply(id=message.id, known=False))
        elif stream.finished:
            self._reply(message.reply_to, ResumeReply(id=message.id, known=True, complete=True))
        elif settled or message.attempt != stream.log.attempt:
            log.warning("tokens of request were lost", extra={"request": stream.id, "have": len(stream.log.tokens)})
            self._resume_after(message, stream)
        else:
            return False
        return True

    def _resume_after(self, message: Finish, stream: RequestStream) -> None:
        stream.log.supersede()  # what is still in flight of the old attempt must not mix with the new one
        reply = ResumeReply(id=message.id, known=True, attempt=stream.log.attempt, token_ids=list(stream.log.tokens))
        self._reply(message.reply_to, reply)

    def _reply(self, address: str, reply: ResumeReply) -> None:
        if not self._outbox.send(address, reply):
            log.warning("agent %s takes no messages", address)

    def close(self) -> None:
        for timer in self._settling.values():
            timer.cancel()
        self._settling.clear()


def _items(final: bytes) -> list[TokenItem]:
    try:
        message = decode(final)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return []
    return message.items if isinstance(message, Tokens) else []
