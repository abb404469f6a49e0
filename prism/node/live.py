"""The requests a device holds, from the moment they were read from its queue until they are acknowledged or moved."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from prism.core.ids import ModelName, RequestId
from prism.core.request import Request
from prism.core.specs import LatePolicy
from prism.engine.api import Handle, Work
from prism.store.values import Entry
from prism.wire.messages import Submission


class Stage(Enum):
    """Where a request stands. Arrows::

    ASKING -> WAITING -> RUNNING -> CLOSING -> (acknowledged)
       ^---------------------'---------'
    """

    ASKING = auto()
    """Its front door was asked which tokens the client has (the request was run before, here or elsewhere); or it has
    answered, and the request waits for its turn (:mod:`prism.node.suspects`)."""
    WAITING = auto()
    """The scheduler has it."""
    RUNNING = auto()
    """An engine has it."""
    CLOSING = auto()
    """The engine is done; the front door was asked whether it has every token."""


@dataclass(slots=True)
class Live:
    """One request on this device. Changed by its :class:`prism.node.device.DeviceShell` only."""

    entry: Entry
    submission: Submission
    stage: Stage = Stage.WAITING
    attempt: int = 1
    tokens: tuple[int, ...] = ()
    """What the client's stream has, as of the last answer of the front door."""
    handle: Handle | None = field(default=None, repr=False)
    suspicions: int = 0
    """Engines that died by themselves in a step of this request, on other devices too."""
    died_of: str = ""
    """What the latest of them said."""

    @property
    def id(self) -> RequestId:
        return RequestId(self.submission.id)

    @property
    def model(self) -> ModelName:
        return ModelName(self.submission.model)

    def work(self) -> Work:
        """The next attempt, as the engine takes it."""
        s = self.submission
        return Work(rid=s.id, payload=s.payload, front=s.front, attempt=self.attempt, resumed=self.tokens)

    def request(self) -> Request:
        """The request as the scheduler sees it."""
        s = self.submission
        return Request(
            id=self.id,
            model=self.model,
            arrival_s=s.arrival_s,
            prompt_tokens=s.prompt_tokens,
            slo_ttft_s=s.slo_ttft_s,
            max_wait_s=s.max_wait_s,
            late=LatePolicy(s.late),
            max_new_tokens=s.max_new_tokens,
            generated_tokens=len(self.tokens),
        )
