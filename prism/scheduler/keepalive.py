"""When a model's keep-alive is over.

Only the node knows since when a model has had no request: front doors send to it without asking the controller. So the
node says how long that is in every report, makes one at the moment at which a keep-alive ends, and the controller
decides on reports alone. A lost or late report delays the decision and never makes it early, and the next one says the
same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prism.core.views import InstanceState
from prism.scheduler.records import ModelRecord

_SLACK_S: Final = 0.001
"""What is missing by less is rounding, not time."""


def due_in_s(rests: Iterable[tuple[float, float | None]]) -> float:
    """Seconds until the next report is due for the keep-alive of ``(idle_s, keep_alive_s)``; infinite when for none.
    What has a request now (``idle_s`` 0) may lose it at once; what has reached its keep-alive was reported then."""
    left = [keep_alive_s - idle_s for idle_s, keep_alive_s in rests if keep_alive_s is not None]
    return min((left_s for left_s in left if left_s > _SLACK_S), default=float("inf"))


def is_over(model: ModelRecord) -> bool:
    """Whether ``model`` should leave: all its active instances were reported to have reached its keep-alive, and nobody
    wants it."""
    if model.spec.keep_alive_s is None or model.pinned or model.waiting:
        return False
    over_s = model.spec.keep_alive_s - _SLACK_S
    return all(i.idle_since_s is not None and i.idle_s >= over_s for i in model.in_state(InstanceState.READY))
