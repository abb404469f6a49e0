"""Commands to node agents: one to each machine of an instance, sent until it is answered, the answers joined."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from prism.controller.distribution import Supply
from prism.controller.joint import Conclusion, Holding, JointOrder, Leave, Step
from prism.core.effects import Activate, Deactivate
from prism.core.events import ActivationError
from prism.core.ids import NodeId
from prism.core.instances import InstanceKey, parts_by_node
from prism.core.specs import ModelSpec
from prism.wire.commands import ActivateCommand, DeactivateCommand
from prism.wire.mailbox import Outbox
from prism.wire.messages import CommandResult

log = logging.getLogger(__name__)

REPEAT_S: Final = 2.0
"""Agents answer a repeated command with the first one's result, so repeating is free of side effects."""


class Mailboxes(Protocol):
    """Who knows where agents are reached (:class:`prism.controller.nodes.FleetNodes`)."""

    def mailbox_of(self, node: NodeId) -> str | None:
        """None when the machine is not up."""


@dataclass(slots=True)
class _Command:
    message: ActivateCommand | DeactivateCommand
    mailbox: str
    node: NodeId
    sent_s: float
    issued_s: float


class Orders:
    """Outstanding commands. What comes of an order is returned as the scheduler's events."""

    def __init__(self, outbox: Outbox, reply_to: str, mailboxes: Mailboxes) -> None:
        self._outbox, self._reply_to, self._mailboxes = outbox, reply_to, mailboxes
        self._commands: dict[str, _Command] = {}
        self._joints: dict[InstanceKey, JointOrder] = {}

    def under_way(self, key: InstanceKey) -> bool:
        """Whether an order for the instance is not over."""
        return key in self._joints

    def activate(
        self, effect: Activate, spec: ModelSpec, supplies: Mapping[NodeId, Supply], now_s: float
    ) -> list[Conclusion]:
        """Orders the instance from all its machines. ``supplies``: by machine, where its weights come from."""
        nodes = parts_by_node(effect.parts)
        joint = self._joints[effect.key] = JointOrder(effect.key, nodes, serves=False)
        found: list[Conclusion] = []
        for node in nodes:
            message = self._activate_command(effect, spec, supplies.get(node) or Supply())
            if joint.holds(node) is Holding.LOADING and not self._send(message, node, now_s):
                found += self._do(joint, joint.failed(node, ActivationError.STALE, f"machine {node} is gone"), now_s)
        return found

    def deactivate(self, effect: Deactivate, now_s: float) -> list[Conclusion]:
        """Lets the instance leave all its machines, whether it serves or still loads."""
        return self._leave(effect.key, parts_by_node(effect.parts), effect.carry, now_s)

    def withdraw(self, key: InstanceKey, nodes: Iterable[NodeId], now_s: float) -> None:
        """Lets what is left of a lost instance leave ``nodes``; the scheduler does not know it any more."""
        if key not in self._joints:
            self._leave(key, nodes, True, now_s)

    def answer(self, result: CommandResult, now_s: float) -> list[Conclusion]:
        """What the result means; nothing for one that was heard before, and for a deactivation that broke: it is
        ordered again."""
        command = self._commands.get(result.command)
        if command is None:
            return []
        message, node = command.message, command.node
        if isinstance(message, DeactivateCommand) and not result.ok:
            log.error("a deactivation broke and is ordered again: %s", result)
            return []
        del self._commands[result.command]
        joint = self._joints.get(message.key)
        if joint is None:
            return []
        if isinstance(message, DeactivateCommand):
            steps = joint.left(node)
        elif result.ok:
            seconds = result.phases.get("total", now_s - command.issued_s)
            steps = joint.ready(node, seconds, result.early, result.whole_only)
        else:
            steps = joint.failed(node, *_why(result))
        return self._do(joint, steps, now_s)

    def node_lost(self, node: NodeId, now_s: float) -> None:
        """Nobody there will answer any more, and what other machines have of its instances is of no use. The scheduler
        hears of the machine itself."""
        for command in [c for c, order in self._commands.items() if order.node == node]:
            del self._commands[command]
        for joint in list(self._joints.values()):
            self._do(joint, joint.lost(node), now_s)

    def repeat(self, now_s: float) -> None:
        """Sends again what was not answered for :data:`REPEAT_S`."""
        for order in self._commands.values():
            if now_s - order.sent_s >= REPEAT_S:
                order.sent_s = now_s
                self._outbox.send(order.mailbox, order.message)

    def _leave(self, key: InstanceKey, nodes: Iterable[NodeId], carry: bool, now_s: float) -> list[Conclusion]:
        joint = self._joints.get(key)
        if joint is None:
            joint = self._joints[key] = JointOrder(key, nodes, serves=True)
        return self._do(joint, joint.deactivate(carry), now_s)

    def _do(self, joint: JointOrder, steps: list[Step], now_s: float) -> list[Conclusion]:
        """Sends what is to be sent; returns what the scheduler is told."""
        told: list[Conclusion] = []
        for step in steps:
            if not isinstance(step, Leave):
                told.append(step)
            elif not self._send(self._deactivate_command(joint.key, step.carry), step.node, now_s):
                told += self._do(joint, joint.lost(step.node), now_s)
        if joint.over:
            self._joints.pop(joint.key, None)
            for command in [c for c, order in self._commands.items() if order.message.key == joint.key]:
                del self._commands[command]
        return told

    def _send(self, message: ActivateCommand | DeactivateCommand, node: NodeId, now_s: float) -> bool:
        """False: the machine is not up."""
        mailbox = self._mailboxes.mailbox_of(node)
        if mailbox is None:
            return False
        self._commands[message.command] = _Command(message, mailbox, node, now_s, now_s)
        self._outbox.send(mailbox, message)
        return True

    def _activate_command(self, effect: Activate, spec: ModelSpec, supply: Supply) -> ActivateCommand:
        return ActivateCommand(
            command=uuid.uuid4().hex,
            reply_to=self._reply_to,
            key=effect.key,
            parts=effect.parts,
            reason=str(effect.reason),
            spec=spec,
            kv_cap_bytes=effect.kv_cap_bytes,
            mark=supply.mark,
            plans=list(supply.plans),
            peers=dict(supply.peers),
            live=effect.live,
            companions=list(supply.company.companions),
            pipeline=supply.company.pipeline,
            turn=supply.company.turn,
            turns=supply.company.turns,
            leads=supply.company.leads,
        )

    def _deactivate_command(self, key: InstanceKey, carry: bool) -> DeactivateCommand:
        return DeactivateCommand(command=uuid.uuid4().hex, reply_to=self._reply_to, key=key, carry=carry)


def _why(result: CommandResult) -> tuple[ActivationError, str]:
    try:
        error = ActivationError(result.error)
    except ValueError:
        error = ActivationError.ENGINE_DIED
    return error, str(result.detail.get("detail", result.error))
