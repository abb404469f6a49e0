"""What a model's attention state consists of: one pool per kind of state, described alike for whoever leases, counts or
moves it.

::

    plain, latent       tokens   K and V (or one latent row) of every layer, a slot per token or page of tokens
    sliding windows     tokens   the layers that see everything
                        window   the layers that see a window; a slot goes when its token leaves the window
    Mamba, linear       tokens   the attention layers
                        states   a slot per state: what a request (or a cached prefix) carries from token to token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from prism.memory._kvcached import Pool


class GroupKind(StrEnum):
    """What a slot of the group is for."""

    TOKENS = "tokens"
    WINDOW = "window"
    STATES = "states"


@dataclass(frozen=True, slots=True)
class KvGroup:
    """One pool of an active model. Slots of different groups have different numbers; those of one token-major group lie
    in one piece: all that the layers of the group know of a slot is ``slot_bytes`` at :meth:`address_of`."""

    kind: GroupKind
    pool: Pool
    max_tokens: int
    """What SGLang believes the pool to hold (states: how many of them); address space, not memory."""
    slot_tokens: int = field(init=False)
    """Tokens in a slot: more than 1 for paged attention. A state counts as one. Asked many times a step, and a pool
    makes its layout anew each time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slot_tokens", self.pool.layout.tokens_per_slot)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all layers of the group."""
        return self.pool.slot_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes a token more takes; 0 for states, which do not grow."""
        return 0 if self.kind is GroupKind.STATES else self.slot_bytes // self.slot_tokens

    def address_of(self, slot: int) -> int:
        """Where the slot's bytes begin in this process's address space."""
        offset_bytes, _, _ = self.pool.regions[0]
        return self.pool.address + offset_bytes + slot * self.slot_bytes
