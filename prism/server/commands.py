"""Operators' commands to the controller: into its stream, answer by mail."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Final

from prism.server.errors import ApiError, from_store, unavailable
from prism.store.interface import Store
from prism.store.values import StoreError
from prism.wire import keys
from prism.wire.commands import AdminCommand
from prism.wire.messages import CommandResult, encode

ANSWER_S: Final = 2.0
"""The controller gives up so long before the caller does, so that its own words arrive."""


class Commands:
    """Commands of one front-door worker. ``reply_to`` is its mailbox."""

    def __init__(self, store: Store, reply_to: str) -> None:
        self._store, self._reply_to = store, reply_to
        self._waiting: dict[str, asyncio.Future[CommandResult]] = {}

    async def call(
        self,
        verb: str,
        model: str = "",
        devices: Sequence[str] = (),
        *,
        carry: bool = False,
        instances: int = 1,
        adapter: str = "",
        timeout_s: float = 120.0,
    ) -> CommandResult:
        """The controller's answer. Raises :class:`ApiError`: 409 when it refused, 503 when none answers in time."""
        command = AdminCommand(
            command=uuid.uuid4().hex,
            reply_to=self._reply_to,
            verb=verb,
            deadline_s=time.time() + timeout_s,
            model=model,
            adapter=adapter,
            devices=list(devices),
            carry=carry,
            instances=instances,
            reason="operator",
        )
        answer: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._waiting[command.command] = answer
        try:
            await self._store.add(keys.COMMANDS, command.command, encode(command))
            async with asyncio.timeout(timeout_s + ANSWER_S):
                result = await answer
        except StoreError as error:
            raise from_store(error) from error
        except TimeoutError:
            message = f"No controller answered the command {verb!r} within {timeout_s:.0f} s."
            raise unavailable(message, code="no_controller") from None
        finally:
            del self._waiting[command.command]
        if not result.ok:
            raise ApiError(409, "command_refused", refusal(result), retry_after_s=None)
        return result

    def answer(self, result: CommandResult) -> None:
        """Mail from the controller; an answer nobody waits for is dropped."""
        waiting = self._waiting.get(result.command)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)


def refusal(result: CommandResult) -> str:
    """What went wrong, in words."""
    detail = result.detail.get("detail")
    return detail if isinstance(detail, str) else result.error
