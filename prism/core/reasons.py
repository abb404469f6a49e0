"""Why a scheduler decided something: one enum of codes, each decision with the numbers it was taken on.

A reason is logged once, when the decision is committed, shown by ``prism plan`` and counted in metrics by its code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

Number = float | int | str
"""What a reason may carry: numbers with units in their names, or the names of models and devices."""


class ReasonCode(StrEnum):
    """Every reason a scheduler can have. The values are stable: logs and metrics use them."""

    # A request, on its device.
    ON_TIME = "on_time"
    """Dispatched in deadline order; expected to meet its TTFT objective."""
    LATE = "late"
    """Dispatched after the requests that are on time: it cannot meet its objective any more."""
    OVERDUE = "overdue"
    """Dispatched ahead of every deadline because it waited for its starvation bound."""
    RESUMED = "resumed"
    """Dispatched ahead of every deadline because its client's stream has begun."""
    ARRIVAL_ORDER = "arrival_order"
    """Dispatched first-come-first-served (admission switched off)."""
    GREEDY = "greedy"
    """Dispatched at once; the engine queues (rival policies)."""
    LATE_REJECTED = "late_rejected"
    """Refused: it cannot be on time and its model says ``late: reject``."""
    QUEUE_FULL = "queue_full"
    """Refused: the bound on waiting requests is reached."""
    PROMPT_TOO_LARGE = "prompt_too_large"
    """Refused: its keys and values cannot fit even with nothing else running."""
    NOT_ACTIVE_HERE = "not_active_here"
    """Sent back: no engine on this device has the model (any more)."""
    CANCELLED = "cancelled"
    """Stopped: the client went away or an operator asked."""
    BEARS_A_PAUSE = "bears_a_pause"
    """Held: the other engines of its device need the bandwidth, and its answers are ahead of their objective."""
    GIVES_WAY = "gives_way"
    """Held: the other engines of its device need the bandwidth to keep more answers in time than it could."""
    # A model, in the cluster.
    DEMAND = "demand"
    """Activated: requests wait for it."""
    PINNED = "pinned"
    """Activated: it is pinned."""
    OPERATOR = "operator"
    """An operator asked for it."""
    FIXED_MAP = "fixed_map"
    """The policy's fixed map places it there (rival policies)."""
    MAKE_ROOM = "make_room"
    """Deactivated: a waiting model needs the memory and this one is idle."""
    KV_PRESSURE = "kv_pressure"
    """Deactivated: requests on its device wait for KV memory and this one is idle, or has far fewer than could run
    instead."""
    STARVATION = "starvation"
    """Deactivated although in use, or hurried on its way out: a waiting model reached half of its starvation bound."""
    CLAIM = "claim"
    """Waits for the devices that are kept for it, since it has waited for half of its starvation bound."""
    KEEP_ALIVE = "keep_alive"
    """Deactivated: idle longer than its keep-alive."""
    MIGRATION = "migration"
    """Activated elsewhere: the pressure there is lower by more than the threshold and the move pays."""
    SCALE_OUT = "scale_out"
    """Activated once more: requests wait too long for the instances there are, or run too slowly on them."""
    STANDING = "standing"
    """Activated once more in free memory: bursts of its requests have needed so many instances."""
    PREWARM = "prewarm"
    """Activated before anybody asks: by its idle times, or by what others were asked, a request is expected soon."""
    SHARED_OUT = "shared_out"
    """Sent back: further instances of its model have come up, and this one's queue is shared out among all."""
    SCALE_IN = "scale_in"
    """Deactivated: the other instances of its model suffice, or a waiting model has none while this one has several."""
    MIGRATED = "migrated"
    """Deactivated: its new instance has taken over."""
    EXCHANGE = "exchange"
    """Deactivated: it changes places with another model, which needs its room first."""
    DRAIN = "drain"
    """Its device is being emptied."""
    CATALOG = "catalog"
    """The catalog changed: the model was removed, or changed so that it must load again."""
    LOST = "lost"
    """Activated again: its device, node or engine was lost."""
    SWAP = "swap"
    """One model at a time: the head group is for another model (``qlm``)."""
    STALE = "stale"
    """Deactivated: an instance that nobody expects any more."""
    NO_FEASIBLE_DEVICE = "no_feasible_device"
    """Refused: no device (group) is large enough even when empty."""
    NO_ROOM = "no_room"
    """Refused: the memory is in use by models that may not leave, and the wait reached its bound."""
    NO_DEVICES = "no_devices"
    """Refused: no device is up."""
    NOT_PLACED = "not_placed"
    """Refused: the policy's fixed map has no place for the model (rival policies)."""
    ACTIVATION_FAILED = "activation_failed"
    """Refused: loading the model failed; it is tried again after a back-off."""
    UNKNOWN_MODEL = "unknown_model"
    """Refused: the catalog has no such model (any more)."""
    MULTICAST = "multicast"
    """A model's weights are sent between machines: the way that was expected to end soonest, and what others would
    have taken."""
    # Explanations of the planner.
    STAY = "stay"
    """Kept where it is: no device is better by more than the threshold."""
    MOVE_DOES_NOT_PAY = "move_does_not_pay"
    """Kept where it is: a move would cost more seconds of service than it gains in the planning window."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A code and the numbers behind it, in the order in which they should be read."""

    code: ReasonCode
    numbers: tuple[tuple[str, Number], ...] = ()

    def as_dict(self) -> dict[str, Number]:
        """``{"code": ..., **numbers}`` for logs and the CLI."""
        return {"code": self.code.value, **dict(self.numbers)}

    def __str__(self) -> str:
        """``late (deadline_s=3.2, backlog_tokens=800)``."""
        if not self.numbers:
            return self.code.value
        return f"{self.code.value} ({', '.join(f'{k}={_short(v)}' for k, v in self.numbers)})"


def because(code: ReasonCode, **numbers: Number) -> Reason:
    """``because(ReasonCode.LATE, deadline_s=3.2)``."""
    return Reason(code, tuple(numbers.items()))


def _short(value: Number) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
