"""The compute speed that a virtual device plays: how long layers take on it. A declaration, never a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """A range of a model's layers that runs for a batch."""

    layers: int
    """How many; 0: what comes before or behind them only."""
    prefill_tokens: int = 0
    sequences: int = 0
    """That decode one token each."""
    kv_tokens: int = 0
    """Tokens whose KV they read, their own with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePace:
    """Seconds that one layer takes, with all of its weights on the device. Embedding, head and sampling take what they
    take.

    ::

        one layer = layer_s                                      its weights are read once for the batch
                  + prefill_tokens * prefill_token_s             arithmetic
                  + sequences * decode_sequence_s + kv_tokens * decode_kv_token_s
    """

    layer_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_kv_token_s: float = 0.0

    def seconds(self, work: LayerWork, shards: int = 1) -> float:
        """Of ``work`` on a device that has one of ``shards`` equal parts of each layer."""
        one_s = (
            self.layer_s
            + work.prefill_tokens * self.prefill_token_s
            + work.sequences * self.decode_sequence_s
            + work.kv_tokens * self.decode_kv_token_s
        )
        return work.layers * one_s / shards

    @property
    def words(self) -> str:
        """For people."""
        return (
            f"{1e3 * self.layer_s:g} ms a layer, {1e6 * self.prefill_token_s:g} us more for a token of a prefill, "
            f"{1e6 * self.decode_sequence_s:g} us for a sequence that decodes and {1e6 * self.decode_kv_token_s:g} us "
            "for each token of its KV"
        )
