"""What all device shells of one node share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prism.core.instances import InstanceKey
from prism.node.measures import NodeMeasures
from prism.store.interface import Queues
from prism.wire.mailbox import Outbox


@dataclass(frozen=True, slots=True)
class NodeServices:
    """Given by the agent, or by a test that plays one."""

    store: Queues
    outbox: Outbox
    mailbox: str
    """Address at which this node takes answers of front doors."""
    consumer: str
    """Its name as a reader of queues."""
    measures: NodeMeasures
    hasten_report: Callable[[], None]
    """The controller has to hear of this node at once, not with its next report."""
    note_emptied: Callable[[InstanceKey], None]
    """An instance runs no request any more."""
    now_s: Callable[[], float] = time.time
    """Unix time: requests are dated by other machines."""
    clock_s: Callable[[], float] = time.monotonic
    """For ages, which must not jump when somebody sets the machine's time."""
