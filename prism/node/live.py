"""The requests a device holds, from the moment they were read from its queue until they are acknowledged or moved."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.specs import LatePolicy
from prism.engine.api import Handle, Work
from prism.scheduler.request_life import Stage
from prism.store.values import Entry
from prism.wire.messages import Submission


@dataclass(slots=True)
class Live:
    """One request on this device. Changed by its :class:`prism.node.desk.RequestDesk` only."""

    entry: Entry
    submission: Submission
    stage: Stage = Stage.NEW
    instance: InstanceKey | None = None
    attempt: int = 1
    tokens: tuple[int, ...] = ()
    """What the client's stream has, as of the last answer of the front door."""
    handle: Handle | None = field(default=None, repr=False)
    """The engine that has it, or had it when its client went away."""
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

    @property
    def delivered_tokens(self) -> int:
        """What the client's stream has."""
        return len(self.tokens)

    @property
    def shown_stage(self) -> str:
        """Where it stands, for operators: whether the scheduler has it while its front door is asked is not theirs."""
        return (Stage.ASKING if self.stage is Stage.LOST else self.stage).name.lower()

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
