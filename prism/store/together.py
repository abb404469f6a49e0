"""Script calls that are made in one turn of the event loop travel as one pipeline: the inputs of one request, the ends
of one step. A call of its own costs the client several times what it costs the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import redis.exceptions as errors
from redis.commands.core import AsyncScript


@dataclass(slots=True)
class _Call:
    script: AsyncScript
    keys: list[str]
    args: list[str | bytes | int | float]
    answer: asyncio.Future[Any]

    def end(self, reply: Any) -> None:
        if self.answer.done():  # its caller is gone
            return
        if isinstance(reply, BaseException):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)


class Together:
    """Of one client and one event loop. Each call has an answer, or an error, of its own; a lost connection is an error
    of all that were under way."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._waiting: list[_Call] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, script: AsyncScript, keys: list[str], args: list[str | bytes | int | float]) -> Any:
        """The script's reply. Raises what the server answered instead, or what ended the connection."""
        loop = asyncio.get_running_loop()
        made = _Call(script, keys, args, loop.create_future())
        self._waiting.append(made)
        if len(self._waiting) == 1:
            loop.call_soon(self._depart)
        return await made.answer

    def _depart(self) -> None:
        calls, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._send(calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, calls: list[_Call]) -> None:
        try:
            replies = [errors.NoScriptError()] if len(calls) == 1 else await self._pipeline(calls)
            for call, reply in zip(calls, replies, strict=True):
                call.end(await self._alone(call) if isinstance(reply, errors.NoScriptError) else reply)
        except BaseException as error:
            for call in calls:
                call.end(error)
            if not isinstance(error, Exception):
                raise

    async def _pipeline(self, calls: list[_Call]) -> list[Any]:
        async with self._client.pipeline(transaction=False) as pipe:
            for call in calls:
                pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.args)
            found: list[Any] = await pipe.execute(raise_on_error=False)
            return found

    async def _alone(self, call: _Call) -> Any:
        """Gives the server the script if it does not have it."""
        try:
            return await call.script(keys=call.keys, args=call.args)
        except errors.ResponseError as error:
            return error
