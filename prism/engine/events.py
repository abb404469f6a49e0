"""What an engine tells its node agent. Values only; they also travel on the control channel (MessagePack).

Tokens are not here: they go straight from the engine worker to the front door (:class:`prism.wire.messages.Tokens`).
"""

from __future__ import annotations

import msgspec

from prism.remote.state import RemoteState


class EngineEvent(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all events of one engine."""


class Accepted(EngineEvent, frozen=True, kw_only=True):
    """The engine has the request in its queue."""

    rid: str


class AttemptFirstToken(EngineEvent, frozen=True, kw_only=True):
    """The first token of this attempt was produced."""

    rid: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens (and resumed tokens) whose KV was found in the engine's prefix cache."""
    prefill_s: float
    """From the start of the first forward pass over the prompt to the token."""
    queued_s: float
    """From the engine taking the request in to the start of that pass."""


class AttemptFinished(EngineEvent, frozen=True, kw_only=True):
    """The engine produced the request's last token (or its error) and handed it to the front door's mailbox.

    ``final`` is the encoded :class:`prism.wire.messages.Tokens` with that last item. If the engine dies within
    a moment, send it to the front door again: it drops what it already has by index.
    """

    rid: str
    attempt: int
    reason: str
    """``stop``, ``length`` or ``abort``."""
    total_tokens: int
    """Generated tokens over all attempts."""
    final: bytes


class Lost(EngineEvent, frozen=True, kw_only=True):
    """The front door's mailbox took no more output, so the request was stopped here. Ask the front door
    (``ResumeQuery``) and run it again, or drop it when the front door is gone."""

    rid: str
    attempt: int
    reason: str


class TokensMade(EngineEvent, frozen=True, kw_only=True):
    """What answers that decode have; about every 25 ms, of an engine that may have to stand still for others
    (:class:`prism.engine.commands.HoldSteps`)."""

    after_first: dict[str, int]
    """Tokens of this attempt after its first one, by request."""


class EngineCounters(EngineEvent, frozen=True, kw_only=True):
    """Where the engine stands; sent when it changes, at most every 50 ms, and once a second while idle."""

    running: int
    queued: int
    free_kv_tokens: int
    """Tokens the engine can take in now: its free mapped slots, what its lease may still map, and what it can evict."""
    used_kv_tokens: int
    cached_kv_tokens: int
    """Tokens kept only for prefix reuse; the engine gives them up under pressure."""
    kv_mapped_bytes: int
    """Physical KV memory held, over all ranks."""
    weight_bytes: int
    """Physical weight memory held, over all ranks."""
    retractions: int
    """Requests taken out of the batch for want of memory since activation (they go on later, token-exact)."""
    kv_kept_pieces: int = 0
    """Pieces of KV stored outside of the engine since activation."""
    kv_brought_tokens: int = 0
    """Tokens whose KV was brought back, or from a peer, since activation instead of being computed again."""
    computed_tokens: int = 0
    """Tokens that were prefilled since activation: prompts, and what was computed again."""
    long_host_bytes: int = 0
    """KV of prompts that are larger than the device, claimed in host memory, over all ranks."""
    long_lent_bytes: int = 0
    """The same in what other devices lend."""
    long_brought_bytes: int = 0
    """Of such KV, what was brought to the device since activation, over all ranks."""
    long_prompts: int = 0
    """Such requests that began since activation; again, if their KV was lost."""
    long_window_tokens: int = 0
    """Slots for which the window of one has memory now."""
    lacks_bytes: int = 0
    """KV that the first request that waits, or what runs, lacks on a rank beyond what the engine can evict. It may be
    more than neighbours' KV would be enough for, and is no wish in the account then."""
    adapters: list[str] = []
    """LoRA adapters in device memory, by name."""
    remote: RemoteState | None = None
    """None: it was never told anything about layers in other engines."""
    paced_s: float = 0.0
    """Declared of the layers that its worker ran since it started, on a device that plays another's speed."""
    overrun_s: float = 0.0
    """By how much their real compute went beyond that: times are this machine's as far."""


class Died(EngineEvent, frozen=True, kw_only=True):
    """The engine is gone; the last event of its stream. Requests without :class:`AttemptFinished` must be run again."""

    reason: str
    suspects: tuple[str, ...] = ()
    """Requests that were in the step in which the engine failed by itself (all it had, where it could not say which);
    empty when it was killed. One that is a suspect twice should be failed, not run again."""


AnyEvent = Accepted | AttemptFirstToken | AttemptFinished | Lost | TokensMade | EngineCounters | Died
