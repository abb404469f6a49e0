"""A request that several engines run one after the other reads like one answer; a scripted agent plays them all."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from prism.wire import keys
from prism.wire.mailbox import Inbox, Outbox
from prism.wire.messages import Finish, ResumeQuery, ResumeReply, TokenItem, Tokens, encode
from tests.patience import PATIENCE_S, until
from tests.server.live import LiveFront

ANSWER = "hé🙂 there".encode()


def item(request_id: str, attempt: int, start: int, ids: bytes, finish: bool = False) -> Tokens:
    reason: dict[str, object] | None = {"type": "stop", "matched": None} if finish else None
    one = TokenItem(
        id=request_id,
        attempt=attempt,
        start=start,
        token_ids=list(ids),
        finish=reason,
        cached_tokens=0,
        engine_time_s=0.0,
        extra=b"",
    )
    return Tokens(engine="e", items=[one])


class Agent:
    """The other side of the protocol, step by step, for the one request that is open."""

    def __init__(self, live: LiveFront) -> None:
        self.live, self.front = live, live.front.broker.inbox.address
        self.address = f"ipc://{live.folder}/agent"

    async def _ask(self, message: Any) -> ResumeReply:
        with Inbox(self.address) as inbox, Outbox() as outbox:
            outbox.send(self.front, message)
            async with asyncio.timeout(PATIENCE_S):
                reply = await inbox.recv()
        assert isinstance(reply, ResumeReply)
        return reply

    def ask(self, message: Any) -> ResumeReply:
        return asyncio.run(self._ask(message))

    def send(self, message: Tokens, arrived: int | None = None) -> None:
        """``arrived``: returns when the client's stream has so many tokens. Questions go another way, and may be
        faster."""
        self.live.tell(message)
        if arrived is not None:
            until(lambda: len(self._stream(message.items[0].id).log.tokens) == arrived, "the tokens' arrival")

    def _stream(self, request_id: str) -> Any:
        return self.live.front.broker.streams[request_id]

    def open_id(self) -> str:
        """The request that waits, once it stands in the agent's list."""
        until(lambda: self.live.node._waiting.get("cold"), "a request")
        return next(s.id for s in list(self.live.front.broker.streams.values()) if s.model == "cold")


@pytest.fixture
def agent(live: LiveFront) -> Any:
    yield Agent(live)

    def acknowledged() -> bool:
        for entry in live.node._waiting.pop("cold", []):
            live.run(live.store.done(entry, live.node.consumer))
        return live.run(live.store.lengths([keys.INACTIVE_QUEUE])) == [0]

    until(acknowledged, "every request being acknowledged")


def answered(live: LiveFront, play: Any) -> str:
    """The text of a streamed chat while ``play(request id)`` acts as the agent in a thread."""
    failure: list[BaseException] = []

    def act() -> None:
        try:
            play()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=act)
    thread.start()
    stream = live.client().chat.completions.create(  # type: ignore[call-overload]
        model="cold", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    thread.join()
    if failure:
        raise failure[0]
    return text


def test_an_answer_over_three_attempts(live: LiveFront, agent: Agent) -> None:
    def play() -> None:
        rid = agent.open_id()
        first = agent.ask(ResumeQuery(id=rid, reply_to=agent.address))
        assert (first.known, first.attempt, first.token_ids) == (True, 2, [])
        agent.send(item(rid, 2, 0, ANSWER[:2]))
        agent.send(item(rid, 2, 2, ANSWER[2:5]), arrived=5)
        second = agent.ask(ResumeQuery(id=rid, reply_to=agent.address))
        assert (second.attempt, bytes(second.token_ids)) == (3, ANSWER[:5])
        agent.send(item(rid, 2, 5, b"late tokens of the dead engine"))
        agent.send(item(rid, 3, 5, ANSWER[5:9]))
        agent.send(item(rid, 3, 7, ANSWER[7:11]), arrived=11)  # overlaps: sent again
        final = encode(item(rid, 3, 11, ANSWER[11:], finish=True))
        done = agent.ask(Finish(id=rid, reply_to=agent.address, attempt=3, total_tokens=len(ANSWER), final=final))
        assert not done.known or done.complete

    assert answered(live, play) == ANSWER.decode()


def test_lost_tokens_are_asked_for_again(live: LiveFront, agent: Agent) -> None:
    """The engine's middle message never came: the front door does not confirm the end, and the rest is run again."""

    def play() -> None:
        rid = agent.open_id()
        agent.send(item(rid, 1, 0, ANSWER[:4]), arrived=4)
        final = encode(item(rid, 1, 8, ANSWER[8:], finish=True))
        reply = agent.ask(Finish(id=rid, reply_to=agent.address, attempt=1, total_tokens=len(ANSWER), final=final))
        assert (reply.complete, reply.attempt, bytes(reply.token_ids)) == (False, 2, ANSWER[:4])
        agent.send(item(rid, 2, 4, ANSWER[4:], finish=True))

    assert answered(live, play) == ANSWER.decode()


def test_a_message_still_on_its_way_is_waited_for(
    live: LiveFront, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it lies unread in the mailbox until the tokens are there."""

    def play() -> None:
        rid = agent.open_id()
        stream = agent._stream(rid)
        monkeypatch.setattr(live.front.broker._resuming, "_behind", lambda: len(stream.log.tokens) < 4)
        final = encode(item(rid, 1, 4, ANSWER[4:], finish=True))

        def late() -> None:
            time.sleep(0.1)
            agent.send(item(rid, 1, 0, ANSWER[:4]))

        thread = threading.Thread(target=late)
        thread.start()
        reply = agent.ask(Finish(id=rid, reply_to=agent.address, attempt=1, total_tokens=len(ANSWER), final=final))
        thread.join()
        assert reply.complete or not reply.known

    assert answered(live, play) == ANSWER.decode()


def test_an_unknown_request_is_said_to_be_unknown(live: LiveFront, agent: Agent) -> None:
    assert not agent.ask(ResumeQuery(id="req_gone-000", reply_to=agent.address)).known
    finish = Finish(id="req_gone-000", reply_to=agent.address, attempt=1, total_tokens=3, final=b"junk")
    assert not agent.ask(finish).known
