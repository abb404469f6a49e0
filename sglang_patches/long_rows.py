"""What a token of one layer is in a long request's window and units, by SGLang's pool.

::

    heads    | K of all heads | V of all heads |      units: all tokens' K, then all tokens' V
    latent   | latent | rope  |                       units: all tokens' rows; V is the latent part of a row
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Shapes of K and V of one token and layer; ``latent``: V is the beginning of K, and is not stored."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    latent: bool

    @classmethod
    def of(cls, pool: Any) -> TokenRows:
        """Of ``MHATokenToKVPool`` or ``MLATokenToKVPool``; of two with equal rows (``SWAKVPool``)."""
        pool = getattr(pool, "full_kv_pool", pool)
        if hasattr(pool, "kv_lora_rank"):
            return cls(1, int(pool.kv_cache_dim), int(pool.kv_lora_rank), pool.dtype, True)
        return cls(int(pool.head_num), int(pool.head_dim), int(pool.v_head_dim), pool.dtype, False)

    @property
    def token_bytes(self) -> int:
        dims = self.key_dim + (0 if self.latent else self.value_dim)
        item_bytes: int = self.dtype.itemsize
        return self.heads * dims * item_bytes

    def parts(self, unit: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a unit's bytes, ``tokens`` x heads x dim, where they lie."""
        flat, cut = unit.view(self.dtype), tokens * self.heads * self.key_dim
        keys = flat[:cut].view(tokens, self.heads, self.key_dim)
        if self.latent:
            return keys, keys[..., : self.value_dim]
        return keys, flat[cut:].view(tokens, self.heads, self.value_dim)

    def packed(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """A unit's bytes."""
        kept = [keys.reshape(-1)] if self.latent else [keys.reshape(-1), values.reshape(-1)]
        return torch.cat(kept).view(torch.uint8)
