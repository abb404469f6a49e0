"""All Redis key names. Nobody else writes one out."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "prism"

INACTIVE_QUEUE: Final = f"{PREFIX}:queue:inactive"
"""Stream of :class:`prism.wire.messages.Submission` for models that are on no device."""

GROUP: Final = "schedulers"
"""Consumer group on every queue."""

PLACEMENT: Final = f"{PREFIX}:placement"
"""Hash: model name -> JSON list of :class:`prism.store.values.Replica`; written by the controller only."""

PLACEMENT_CHANGED: Final = f"{PREFIX}:placement:changed"
"""Pub/sub channel: a model name whose placement changed."""

AGENTS: Final = f"{PREFIX}:agents"
"""Hash: node id -> JSON ``{mailbox, devices, seen_s}``."""

FRONTS: Final = f"{PREFIX}:fronts"
"""Hash: mailbox address of a front-door worker -> Unix time of its last announcement."""

CONTROLLER: Final = f"{PREFIX}:controller"
"""String with expiry: JSON ``{mailbox, id}`` of the controller that holds the lease."""

CONTROLLER_FENCE: Final = f"{PREFIX}:controller:fence"
"""Counter: the fence of the latest lease."""

COMMANDS: Final = f"{PREFIX}:queue:commands"
"""Stream of :class:`prism.wire.commands.AdminCommand` for the controller."""

REQUESTS: Final = f"{PREFIX}:requests"
"""Hash: request id -> ``queue SP entry-id``, for every request in any queue. Makes adding idempotent and cancelling
exact."""

RUNNING: Final = f"{PREFIX}:running"
"""Hash: a device's queue -> requests of it that engines run, as its agent told last."""

CATALOG_GENERATION: Final = f"{PREFIX}:catalog:generation"
COUNTERS: Final = f"{PREFIX}:counters"
"""Hash: statistic -> number."""

DECISIONS: Final = f"{PREFIX}:decisions"
"""Capped list of JSON lines, newest first."""

DOCS: Final = f"{PREFIX}:docs"
"""Hash: name -> JSON document for operators' views."""


def rate_bucket(name: str) -> str:
    """Hash ``{level, at}`` of one token bucket; expires when it is full again."""
    return f"{PREFIX}:rate:{name}"


def device_queue(device: str) -> str:
    """Stream of submissions for the models active on ``device``."""
    return f"{PREFIX}:queue:device:{device}"
