"""What the store holds, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from prism.core.errors import PrismError
from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import Parts, devices_of, queue_device
from prism.core.views import InstanceState
from prism.wire.commands import AdminCommand
from prism.wire.messages import Submission, decode

FRONT_DEAD: Final = 0.0
"""What stands in place of a front door's last announcement once its process was seen to end."""

MOST_BEFORE: Final = 1_000
"""Counting further would cost the store more than knowing is worth."""


class StoreError(PrismError):
    """The store cannot do what was asked."""


class StoreUnavailable(StoreError):
    """The server did not answer within the retry time; whether the last command was carried out is unknown (all of them
    may be repeated)."""


class StoreRefused(StoreError):
    """The server does not let this process in: the password is missing or wrong."""


class QueueFull(StoreError):
    """The queue holds ``length`` requests and its bound is ``limit``; nothing was added."""

    def __init__(self, queue: str, length: int, limit: int) -> None:
        self.queue, self.length, self.limit = queue, length, limit
        super().__init__(f"queue {queue} holds {length} requests, its bound is {limit}")


class LeaseLost(StoreError):
    """Another controller holds the lease by now; the write was refused."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a queue, owned by the consumer that read it until it is done, moved, or taken over."""

    queue: str
    entry_id: str
    request_id: str
    data: bytes = field(repr=False)
    deliveries: int = 1
    """How often it was handed to a consumer; 2 or more: an owner died while it had it."""

    @property
    def submission(self) -> Submission:
        """The request. Raises :class:`msgspec.ValidationError` when the entry holds something else."""
        message = decode(self.data)
        if not isinstance(message, Submission):
            raise msgspec.ValidationError(
                f"entry {self.entry_id} of {self.queue} is a {type(message).__name__}, not a Submission"
            )
        return message

    @property
    def command(self) -> AdminCommand:
        """The operator's command (entries of :data:`prism.wire.keys.COMMANDS`)."""
        message = decode(self.data)
        if not isinstance(message, AdminCommand):
            raise msgspec.ValidationError(
                f"entry {self.entry_id} of {self.queue} is a {type(message).__name__}, not an AdminCommand"
            )
        return message


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """How a withdrawal ended: the request left the queue unread, or ``owner`` (a consumer) has it and must be told."""

    removed: bool
    queue: str = ""
    owner: str = ""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One instance of a model, as front doors see it. Requests are routed to ``ready`` ones only."""

    parts: Parts
    state: InstanceState
    generation: Generation
    reason: str = ""
    since_s: float = 0.0

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        """All devices of all parts."""
        return devices_of(self.parts)

    @property
    def queue_device(self) -> DeviceId:
        """The device whose queue takes the instance's requests."""
        return queue_device(self.parts)

    @property
    def ready(self) -> bool:
        return self.state is InstanceState.READY


class AgentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node agent as it announces itself; it is alive while ``seen_s`` is recent."""

    node: NodeId
    mailbox: str
    devices: list[DeviceId]
    seen_s: float
    protocol: int = 1
    """The agent's :data:`prism.wire.message.PROTOCOL_VERSION`; agents before the second said nothing."""
    pid: int = 0
    detail: dict[str, object] = {}
    """What the operator's views show: memory per device, engines, running requests."""


class ControllerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The controller that holds the lease. ``fence`` grows with every new holder."""

    id: str
    mailbox: str
    fence: int


@dataclass(frozen=True, slots=True)
class RateVerdict:
    """The state of one rate limit after an attempt to take from it."""

    allowed: bool
    limit: int
    remaining: int
    reset_s: float
    """Seconds until the whole limit is available again."""
    retry_after_s: float = 0.0
    """Seconds until the refused amount would be allowed; 0 when it was."""


@dataclass(frozen=True, slots=True)
class PlacementChange:
    """``model`` has new replicas; None: anything may have changed (the connection was lost meanwhile), read all of it
    again."""

    model: ModelName | None
