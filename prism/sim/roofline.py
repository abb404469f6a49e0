"""How long one engine step takes alone on its device(s): a roofline of the model's shape and the device's rates.

A step computes a set of new tokens. Its time is::

    overhead + per_sequence * sequences                                 host: scheduling, launches, sampling
    + entry * sequences (prefill)                                       host: what a request takes when it enters
    + switch (the first decode after a prefill)                         host: making one batch of old and new ones
    + max(gemm_token * tokens + head * sequences, weights)              linear layers: compute against one weight read
    + attention_pair * pairs                                            prefill attention: compute, (query, key) pairs
    + kv_token * context                                                decode attention: reads every cached K and V
    + tp > 1: comm + comm_token * tokens                                two all-reduces per layer

The head (hidden states to the vocabulary) is computed for one token of each sequence: in prefill for the last one.
A decode step of a fixed batch therefore costs ``a + b * i`` in its ``i``-th repetition (the context grows by the batch
each time), so that a run of them has a closed form: :class:`Run`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from prism.core.specs import ModelShape, ModelSpec
from prism.sim.gpus import GpuKind


def layer_flops_per_token(shape: ModelShape) -> float:
    """Floating-point operations of the layers' linear parts for one token: two per parameter it touches."""
    attention = shape.attention_weights or shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    mlp = 3 * shape.hidden * shape.intermediate
    return 2.0 * shape.layers * (attention + mlp)


def head_flops(shape: ModelShape) -> float:
    """The same of the head, for each token whose logits are wanted."""
    return 2.0 * shape.hidden * shape.vocab


@dataclass(slots=True)
class Load:
    """Shares (0..1) of a device that a step uses while it runs alone."""

    compute: float
    memory: float


@dataclass(slots=True)
class Run:
    """``count`` repetitions of a step, the ``i``-th takes ``first_s + growth_s * i``, and the first ``lead_s`` more."""

    first_s: float
    growth_s: float
    lead_s: float = 0.0

    def total_s(self, count: int) -> float:
        return self.lead_s + count * self.first_s + self.growth_s * (count * (count - 1) // 2)

    def done(self, work_s: float, count: int) -> int:
        """How many of ``count`` repetitions ``work_s`` seconds complete."""
        a, b, lead_s = self.first_s, self.growth_s, self.lead_s
        stepping_s = max(0.0, work_s - lead_s)
        if b <= 0.0:
            guess = int(stepping_s / a)
        else:
            half = a - b / 2
            guess = int((sqrt(half * half + 2 * b * stepping_s) - half) / b)
        guess = min(max(guess, 0), count)
        # As total_s has it: asked with every report of every engine.
        until_s = work_s + 1e-9 * a
        while guess < count and lead_s + (guess + 1) * a + b * ((guess + 1) * guess // 2) <= until_s:
            guess += 1
        while guess > 0 and lead_s + guess * a + b * (guess * (guess - 1) // 2) > until_s:
            guess -= 1
        return guess


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds per unit of work for one model on one kind of device (see the module)."""

    overhead_s: float
    sequence_s: float
    gemm_token_s: float
    weights_s: float
    attention_pair_s: float
    kv_token_s: float
    comm_s: float
    comm_token_s: float
    engine_share: float
    overhead_is_compute: bool
    thread_share: float = 0.0
    entry_s: float = 0.0
    """This and the next only measurements say: they are 0 in the roofline of :func:`step_cost`."""
    switch_s: float = 0.0
    head_s: float = 0.0

    def prefill(self, tokens: int, pairs: float, context: int, sequences: int) -> tuple[float, Load]:
        """Seconds and load of a step that computes ``tokens`` prompt tokens of ``sequences`` requests: ``pairs``
        (query, key) pairs, over ``context`` tokens that stand in the cache already."""
        gemm_s = self.gemm_token_s * tokens + self.head_s * sequences
        compute_s = gemm_s + self.attention_pair_s * pairs
        memory_s = self.weights_s + self.kv_token_s * context
        sequences_s = (self.sequence_s + self.entry_s) * sequences
        host_s = self.overhead_s + sequences_s + self.comm_s + self.comm_token_s * tokens
        linear_s = max(gemm_s, self.weights_s)
        total_s = host_s + linear_s + max(self.attention_pair_s * pairs, self.kv_token_s * context)
        return total_s, self._load(compute_s, memory_s, host_s, total_s)

    def decode(self, batch: int, context: int, was_idle: bool = False) -> tuple[Run, Load]:
        """A run of decode steps of ``batch`` sequences that together hold ``context`` tokens at the first one.
        ``was_idle``: the engine decoded for nobody before."""
        compute_s = (self.gemm_token_s + self.head_s) * batch
        memory_s = self.weights_s + self.kv_token_s * context
        host_s = self.overhead_s + self.sequence_s * batch + self.comm_s + self.comm_token_s * batch
        first_s = host_s + max(compute_s, self.weights_s) + self.kv_token_s * context
        lead_s = self.switch_s if was_idle else 0.0
        load = self._load(compute_s, memory_s, host_s, first_s)
        if self.overhead_is_compute and self.thread_share and batch > 1:
            load.compute = (
                self.thread_share + (self.engine_share - self.thread_share) * batch * self._lone_s() / first_s
            )
        return Run(first_s, self.kv_token_s * batch, lead_s), load

    def _lone_s(self) -> float:
        """A decode step of one sequence."""
        return self.overhead_s + self.sequence_s + max(self.gemm_token_s + self.head_s, self.weights_s)

    def prefill_tokens_per_s(self, chunk_tokens: int) -> float:
        """Speed of a long prompt cut into chunks: the first guess that schedulers get."""
        seconds, _ = self.prefill(chunk_tokens, chunk_tokens * chunk_tokens / 2, 0, 1)
        return chunk_tokens / seconds

    def _load(self, compute_s: float, memory_s: float, host_s: float, total_s: float) -> Load:
        compute, memory = min(1.0, compute_s / total_s), min(1.0, memory_s / total_s)
        if self.overhead_is_compute:  # one engine is one busy core, which does not draw all of the host's bandwidth
            return Load(self.engine_share, memory * self.engine_share)
        return Load(compute * self.engine_share, memory)


def step_cost(model: ModelSpec, gpu: GpuKind, tp: int | None = None) -> StepCost:
    """The roofline of ``model`` on ``gpu``, one of ``tp`` shards (default: the model's)."""
    tp = tp or model.tp
    shape = model.shape
    flops = gpu.flops * gpu.compute_efficiency * tp
    bandwidth = gpu.memory_bytes_per_s * gpu.memory_efficiency * tp
    # Devices without NVLink reduce over PCIe.
    between = max(gpu.nvlink_bytes_per_s, gpu.pcie_bytes_per_s * gpu.pcie_efficiency)
    reduced_bytes = 2 * shape.layers * shape.hidden * shape.dtype_bytes if tp > 1 else 0
    return StepCost(
        overhead_s=gpu.step_overhead_s,
        sequence_s=gpu.sequence_overhead_s,
        gemm_token_s=layer_flops_per_token(shape) / flops,
        weights_s=model.weight_bytes / bandwidth,
        attention_pair_s=4.0 * shape.layers * shape.heads * shape.head_dim / flops,
        kv_token_s=shape.kv_bytes_per_token / (gpu.memory_bytes_per_s * gpu.kv_efficiency * tp),
        comm_s=2 * shape.layers * gpu.allreduce_s if tp > 1 else 0.0,
        comm_token_s=2 * reduced_bytes * (tp - 1) / tp / between,
        engine_share=gpu.engine_share,
        overhead_is_compute=gpu.overhead_is_compute,
        thread_share=gpu.thread_share,
        head_s=head_flops(shape) / flops,
    )
