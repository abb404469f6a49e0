"""What a model and a device are, as every layer sees them. Frozen: a reload builds new ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from prism.core.ids import DeviceId, ModelName, NodeId
from prism.core.pace import DevicePace
from prism.core.settings import LiveMode


class LatePolicy(StrEnum):
    """What happens to a request that cannot meet its TTFT objective any more."""

    SERVE = "serve"
    """It runs after the requests that are on time."""
    REJECT = "reject"
    """It is refused at once with 429, so that the client can go elsewhere."""


class Prefer(StrEnum):
    """Which of its objectives a model's requests are admitted by, where not all can have both."""

    TTFT = "ttft"
    """First tokens in time: its requests begin although the device is too busy for their time per token."""
    TPOT = "tpot"
    """A steady stream: its requests wait, beyond their objective for the first token too, until they would have it."""
    BOTH = "both"
    """Both or nothing: what can have only one of them waits for those that can have both."""


class Scheduling(StrEnum):
    """In which order an engine serves its model's requests."""

    DEADLINE = "deadline"
    """As the device's scheduler hands them over, each when it can start; it stays until it ends."""
    FAIR = "fair"
    """By turns, least served first (:mod:`prism.policy.fair`); those whose turn it is not are paged out."""


class LendingRole(StrEnum):
    """A model's part where devices lend memory for KV to each other (:mod:`prism.kv.lent_shelf`)."""

    BOTH = "both"
    LENDER = "lend"
    """Devices it is on lend what it leaves free; its own KV stays on its device or in host memory."""
    BORROWER = "borrow"
    """Its KV may go to other devices; those it is on lend nothing."""
    NONE = "none"

    @property
    def lends(self) -> bool:
        return self in (LendingRole.BOTH, LendingRole.LENDER)

    @property
    def borrows(self) -> bool:
        return self in (LendingRole.BOTH, LendingRole.BORROWER)


class ModelKind(StrEnum):
    """What a model answers with."""

    GENERATE = "generate"
    """Text, token by token."""
    EMBED = "embed"
    """A vector for each text."""
    CLASSIFY = "classify"
    """A score per label for each text; a reward model has one label."""
    RERANK = "rerank"
    """A cross-encoder: a score for a pair of texts that it reads together."""


class DeviceKind(StrEnum):
    CUDA = "cuda"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What decode steps on a device cost (:mod:`prism.policy.device_time`)."""

    step_s: float
    """Host time of a step that nothing overlaps."""
    sequence_s: float
    """The part of it that grows with each sequence."""
    bytes_per_s: float
    """Memory bandwidth that decoding reaches."""


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """What ``prism profile`` found of a model on devices of its own, as far as schedulers and agents start from it."""

    kind: DeviceKind
    """Of the devices for which it holds."""
    rates: DeviceRates
    """Of decode steps as large as those at the largest rate that meets the objectives."""
    prefill_tokens_per_s: float
    burst_bytes: int
    """On each device: what a burst of twice that rate holds beyond what requests at that rate do."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only transformer that decide memory and step time."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    dtype_bytes: int = 2
    latent: int = 0
    """Latent attention: elements that one token keeps per layer, one row instead of K and V of heads (``kv_heads`` is 1
    then, and ``head_dim`` the mean of a key's and a value's)."""
    attention_weights: int = 0
    """Parameters of one layer's attention; 0: those of queries, keys, values and output by the dimensions above."""

    guesser_kv_bytes: int = 0
    """K and V of one token in the model that guesses for this one, which lie beside its own."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers (whole model, all tensor-parallel shards together)."""
        own = self.layers * (self.latent or 2 * self.kv_heads * self.head_dim) * self.dtype_bytes
        return own + self.guesser_kv_bytes

    def kv_bytes_per_rank(self, tp: int) -> int:
        """The same on one of ``tp`` devices: each keeps its share of the heads, and no less than one (or the row)."""
        return -(-self.kv_bytes_per_token // min(tp, self.kv_heads))


@dataclass(frozen=True, slots=True)
class LoraRoom:
    """What every engine of a model keeps for LoRA adapters, which share its weights."""

    slots: int
    """Adapters in device memory at a time: a step runs requests of so many different ones, and of the model itself."""
    max_rank: int
    modules: tuple[str, ...]
    """Layers that adapters may change, by the engine's names (``qkv_proj``, ``o_proj``, ``gate_up_proj``, ...)."""


class SpeculativeAlgorithm(StrEnum):
    """Who guesses the next tokens, which the model then checks in one step."""

    NGRAM = "ngram"
    """What followed the last tokens before, in this and earlier answers of the engine."""
    EAGLE = "eagle"
    """A small model that sees what the last layer of the other made of the last token."""
    EAGLE3 = "eagle3"
    """One that sees what several of its layers made of it."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How engines of a model guess tokens. What they answer does not depend on it."""

    algorithm: SpeculativeAlgorithm
    draft_tokens: int
    """Nodes of the tree of guesses that one step checks for each request, its last token with them."""
    ngrams: int = 0
    """Nodes of the table that an engine guesses from, in host memory."""
    draft: str = ""
    """The folder, or Hugging Face id, of the model that guesses; "": none does. Its weights are part of the model's
    ``weight_bytes``."""
    steps: int = 0
    """Tokens that it guesses one behind the other."""
    branches: int = 0
    """Guesses that it goes on from in each of these steps."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model of the catalog, with its objectives. Sizes are of the whole model, a tensor-parallel shard has 1/tp."""

    name: ModelName
    path: str
    """A local folder or a Hugging Face id."""
    slo_ttft_s: float
    slo_tpot_s: float
    weight_bytes: int
    shape: ModelShape
    context_tokens: int
    """0: as the engine finds it."""
    tp: int = 1
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    keep_alive_s: float | None = None
    """Idle time after which the model may leave although nobody needs the memory; None: only when it is needed."""
    min_kv_bytes: int = 0
    """KV memory that must stay free beside the weights for the model to be placed on a device."""
    late: LatePolicy = LatePolicy.SERVE
    prefer: Prefer = Prefer.BOTH
    max_wait_s: float = 60.0
    """Starvation bound: after this wait a request is scheduled ahead of every deadline."""
    engine_args: tuple[tuple[str, object], ...] = field(default=())
    """Passed to the engine as they are (name, value)."""
    kind: ModelKind = ModelKind.GENERATE
    scheduling: Scheduling = Scheduling.DEADLINE
    lending: LendingRole = LendingRole.BOTH
    live: LiveMode | None = None
    """When its further instances begin to serve; None: as for all models."""
    lora: LoraRoom | None = None
    """None: its engines take no adapters. The memory for them is part of ``weight_bytes``."""
    speculation: Speculation | None = None
    profile: ModelProfile | None = None
    """None: nobody has profiled it, and times begin as guesses."""

    @property
    def shard_weight_bytes(self) -> int:
        return -(-self.weight_bytes // self.tp)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device of the fleet: a GPU, or host memory with a hard cap that stands in for one."""

    id: DeviceId
    node: NodeId
    kind: DeviceKind
    memory_bytes: int
    """What models may use of it: the cap of the device's account."""
    domain: str = ""
    """Devices with the same domain reach each other over the fast interconnect (NVLink); "" is the node itself."""
    page_bytes: int = 0
    """Its memory comes in pages of this size: an instance's KV takes whole ones, at least one. 0: it is not divided."""
    weight_page_bytes: int = 0
    """The same for weights, whose pages may be larger."""
    max_engines: int = 0
    """Most instances with a part on it at a time, in whatever state: each is an engine process. 0: no bound."""
    engine_bytes: int = 0
    """What the process of an instance takes of its memory beside weights and KV (context, graphs, workspaces)."""
    pace: DevicePace | None = None
    """The compute speed that a virtual device plays; None: it computes as fast as it can."""
