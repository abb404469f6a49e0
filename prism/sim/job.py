"""One request on its way through the simulated system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prism.core.ids import DeviceId, ModelName, RequestId
from prism.core.request import Request
from prism.core.specs import ModelSpec

if TYPE_CHECKING:
    from prism.sim.engine import Engine


class Job:
    """The request, what has come of it, and where it stands in an engine. Mutable: owned by whoever holds it (front
    door, device queue or engine)."""

    __slots__ = ("arrival_s", "blocks", "computed_tokens", "device", "end_s", "engine", "entered_step", "error",
                 "first_token_s", "generated", "held_blocks", "id", "index", "kv_tokens", "left_tokens", "lost_times",
                 "model", "output_tokens", "prompt_tokens", "spec", "ticket")  # fmt: skip

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
        self.lost_times = 0
        """Attempts lost with their engine or carried elsewhere."""
        # In an engine:
        self.engine: Engine | None = None
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

    def request(self, cached_tokens: int = 0) -> Request:
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
            0 if self.generated else cached_tokens,
            self.generated,
        )

    @property
    def remaining(self) -> int:
        """Tokens still to be made, as of when it joined the batch."""
        return self.output_tokens - self.generated
