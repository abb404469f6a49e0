"""One inference request as the schedulers see it: when it came, how much work it is, by when its first token is due."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism.core.ids import ModelName, RequestId
from prism.core.specs import LatePolicy


@dataclass(frozen=True, slots=True)
class Request:
    """A request that stands in a device's queue. Frozen: a resumed attempt is a new value (:meth:`resumed`)."""

    id: RequestId
    model: ModelName
    arrival_s: float
    """When the front door had read the request, on the same clock as the scheduler's ``now_s``."""
    prompt_tokens: int
    slo_ttft_s: float
    max_wait_s: float
    """Starvation bound: after this wait the request goes ahead of every deadline."""
    late: LatePolicy = LatePolicy.SERVE
    max_new_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that a prefix cache on this device already covers (0 when unknown)."""
    generated_tokens: int = 0
    """Tokens that earlier attempts have delivered; a resumed request prefills prompt and these."""
    # These follow from the others. They are kept because a plan asks all waiting requests, many times a second.
    deadline_s: float = field(init=False, repr=False, compare=False)
    """When the first token is due."""
    must_run_s: float = field(init=False, repr=False, compare=False)
    """When waiting ends whatever it costs others."""
    prefill_tokens: int = field(init=False, repr=False, compare=False)
    """Tokens that the engine has to compute before the next token can be made; at least one."""

    def __post_init__(self) -> None:
        tokens = self.prompt_tokens - self.cached_tokens + self.generated_tokens
        object.__setattr__(self, "deadline_s", self.arrival_s + self.slo_ttft_s)
        object.__setattr__(self, "must_run_s", self.arrival_s + self.max_wait_s)
        object.__setattr__(self, "prefill_tokens", tokens if tokens > 0 else 1)

    @property
    def is_resumed(self) -> bool:
        """Its client's stream has begun, so that every second of waiting is a gap between tokens."""
        return self.generated_tokens > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V stand in memory when the prefill is done."""
        return self.prompt_tokens + self.generated_tokens

    def resumed(self, generated_tokens: int) -> Request:
        """The same request after an attempt was lost with ``generated_tokens`` delivered in all."""
        return Request(
            self.id,
            self.model,
            self.arrival_s,
            self.prompt_tokens,
            self.slo_ttft_s,
            self.max_wait_s,
            self.late,
            self.max_new_tokens,
            0,  # the cache that covered the prompt may have died with the attempt
            max(self.generated_tokens, generated_tokens),
        )
