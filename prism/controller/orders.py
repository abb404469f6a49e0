"""Commands to node agents: sent until they are answered, matched with their answers."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import Final

from prism.controller.distribution import Supply
from prism.core.effects import Activate as ActivateEffect
from prism.core.effects import Deactivate as DeactivateEffect
from prism.core.events import (
    ActivationError,
    ActivationFailed,
    ActivationFinished,
    ClusterEvent,
    DeactivationFinished,
)
from prism.core.ids import Generation, ModelName, NodeId, node_of
from prism.core.instances import InstanceKey
from prism.core.specs import ModelSpec
from prism.wire.mailbox import Outbox
from prism.wire.messages import Activate, CommandResult, Deactivate

log = logging.getLogger(__name__)

REPEAT_S: Final = 2.0
"""Agents answer a repeated command with the first one's result, so repeating is free of side effects."""


@dataclass(slots=True)
class _Order:
    message: Activate | Deactivate
    mailbox: str
    node: NodeId
    sent_s: float
    issued_s: float


class Orders:
    """Outstanding commands."""

    def __init__(self, outbox: Outbox, reply_to: str) -> None:
        self._outbox, self._reply_to = outbox, reply_to
        self._open: dict[str, _Order] = {}

    def send(
        self,
        effect: ActivateEffect | DeactivateEffect,
        spec: ModelSpec | None,
        mailbox: str,
        now_s: float,
        supply: Supply | None = None,
    ) -> None:
        """Orders what ``effect`` says from the agent at ``mailbox``; ``spec`` and ``supply`` go with an activation."""
        command, devices, reason = uuid.uuid4().hex, [str(d) for d in effect.devices], str(effect.reason)
        message: Activate | Deactivate
        if isinstance(effect, ActivateEffect):
            if spec is None:
                raise ValueError("an activation needs the model's spec")
            supply = supply or Supply()
            message = Activate(
                command=command,
                reply_to=self._reply_to,
                model=effect.model,
                devices=devices,
                generation=effect.key.generation,
                reason=reason,
                spec=spec,
                kv_cap_bytes=effect.kv_cap_bytes,
                mark=supply.mark,
                parts=list(supply.parts),
                peers=dict(supply.peers),
            )
        else:
            message = Deactivate(
                command=command,
                reply_to=self._reply_to,
                model=effect.model,
                devices=devices,
                generation=effect.key.generation,
                carry=effect.carry,
                reason=reason,
            )
        node = node_of(effect.devices[0])
        self._open[command] = _Order(message, mailbox, node, now_s, now_s)
        self._outbox.send(mailbox, message)

    def answer(self, result: CommandResult, now_s: float) -> tuple[ClusterEvent, CommandResult] | None:
        """The event a result stands for; None for an answer that was heard before, and for a deactivation that broke:
        it is ordered again."""
        order = self._open.get(result.command)
        if order is None:
            return None
        if isinstance(order.message, Deactivate) and not result.ok:
            log.error("a deactivation broke and is ordered again: %s", result)
            return None
        del self._open[result.command]
        return _event(order, result, now_s), result

    def node_lost(self, node: NodeId) -> None:
        """Nobody will answer any more; the scheduler hears of the node itself."""
        for command in [c for c, order in self._open.items() if order.node == node]:
            del self._open[command]

    def repeat(self, now_s: float) -> None:
        for order in self._open.values():
            if now_s - order.sent_s >= REPEAT_S:
                order.sent_s = now_s
                self._outbox.send(order.mailbox, order.message)


def _key(message: Activate | Deactivate) -> InstanceKey:
    return InstanceKey(ModelName(message.model), Generation(message.generation))


def _event(order: _Order, result: CommandResult, now_s: float) -> ClusterEvent:
    message = order.message
    if isinstance(message, Deactivate):
        return DeactivationFinished(_key(message))
    if result.ok:
        return ActivationFinished(_key(message), result.phases.get("total", now_s - order.issued_s))
    try:
        error = ActivationError(result.error)
    except ValueError:
        error = ActivationError.ENGINE_DIED
    return ActivationFailed(_key(message), error, str(result.detail.get("detail", result.error)))
