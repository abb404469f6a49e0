"""One request on its way through the simulated system."""

from __future__ import annotations

from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.instances import InstanceKey
from prism.core.request import Request
from prism.core.specs import ModelSpec
from prism.scheduler.request_life import Stage


class Job:
    """The request, what has come of it, and where it stands in an engine. Mutable: owned by whoever holds it (front
    door, device queue or engine)."""

    __slots__ = ("arrival_s", "blocks", "computed_tokens", "device", "end_s", "entered_step", "error",
                 "first_token_s", "generated", "held_blocks", "id", "index", "instance", "kv_tokens", "left_tokens",
                 "model", "output_tokens", "prompt_tokens", "spec", "stage", "ticket")  # fmt: skip

    def __init__(self, index: int, spec: ModelSpec, arrival_s: float, prompt: int, output: int) -> None:
        self.index = index
        self.id = RequestId(f"r{index}")
        self.spec = spec
        self.model: ModelName = spec.name
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt
        self.output_tokens = output
        self.blocks: tuple[int, ...] = ()
        """Ids of the whole blocks of its prompt (empty: nothing is known to be shared)."""
        self.generated = 0
        """Tokens delivered so far (while it decodes: up to when it joined the batch)."""
        self.first_token_s = -1.0
        self.end_s = -1.0
        self.error = ""
        self.device: DeviceId | None = None
        """Device whose queue or engine has it; None: the inactive queue, or none any more."""
        self.stage = Stage.NEW
        self.instance: InstanceKey | None = None
        """Both: on its device (:class:`prism.scheduler.request_life.DeviceRequests`)."""
        # In an engine:
        self.left_tokens = 0
        """Still to be prefilled."""
        self.computed_tokens = 0
        """Prompt tokens in KV memory (cached ones included)."""
        self.kv_tokens = 0
        """KV tokens it owns alone."""
        self.held_blocks: list[int] = []
        """Cache blocks it holds."""
        self.entered_step = 0
        self.ticket = 0
        """Place in the batch's finishing order; 0: not in the batch."""

    def request(self) -> Request:
        """The value the schedulers see."""
        spec = self.spec
        return Request(
            self.id,
            self.model,
            self.arrival_s,
            self.prompt_tokens,
            spec.slo_ttft_s,
            spec.max_wait_s,
            spec.late,
            self.output_tokens,
            generated_tokens=self.generated,
        )

    @property
    def delivered_tokens(self) -> int:
        """What its client has."""
        return self.generated

    @property
    def remaining(self) -> int:
        """Tokens still to be made, as of when it joined the batch."""
        return self.output_tokens - self.generated
