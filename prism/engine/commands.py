"""What the pool and a worker say to each other on the worker's control channel (MessagePack in frames).

Pool to worker: :data:`Command`. Worker to pool: :data:`Report`. Nothing else, and nothing pickled.
"""

from __future__ import annotations

import msgspec
import xxhash

from prism.engine.events import Accepted, AttemptFinished, AttemptFirstToken, EngineCounters, Lost, TokensMade
from prism.remote.orders import GrowRoute, HoldPieces, OrderDone, ServeLayers, SetRoute


class _Frame(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    pass


# --- to a worker ---


class ActivateModel(_Frame, frozen=True, kw_only=True):
    """Become rank ``rank`` of ``world`` of an engine for ``model``."""

    engine: str
    model: str
    server_args: bytes
    """JSON object: keyword arguments of SGLang's ``ServerArgs``."""
    rank: int
    world: int
    rendezvous: str
    """``file://`` address under which the ranks find each other."""
    limit_bytes: int | None
    """KV bytes the model may hold on this rank's device at first; None: what the account grants."""
    mark: str = ""
    """The weights' fingerprint, for a folder that has none in it."""
    weight_bytes: int = 0
    """Their size, all ranks together, as the catalog knows it."""
    first_pieces: list[int] = []
    """Serve as soon as these pieces of the model are there (:mod:`prism.remote.orders`); empty: all of them."""
    turn: int = 0
    """With which of ``turns`` chunks of its image the engine begins, if it comes from disk."""
    turns: int = 1
    fair: bool = False
    """Its requests take turns."""
    prefill_tokens_per_s: float = 0.0
    """Of its prompts, by its profile; 0: it has none for this kind of device."""
    borrows: bool = True
    """Its KV may go to what other devices lend."""
    helpers: dict[str, str] = {}
    """Sockets of parked workers on other devices that may help to load this rank's weights, by device
    (:mod:`prism.engine.help_desk`)."""

    @property
    def build(self) -> str:
        """See :func:`build_name`."""
        return build_name(self.server_args, self.limit_bytes, self.world)


class Submit(_Frame, frozen=True, kw_only=True):
    """One attempt at a request (:class:`prism.engine.api.Work`)."""

    rid: str
    payload: bytes
    front: str
    attempt: int
    resumed: list[int]


class AbortRequest(_Frame, frozen=True, kw_only=True):
    rid: str


class SetKvLimit(_Frame, frozen=True, kw_only=True):
    limit_bytes: int | None


class DropAdapter(_Frame, frozen=True, kw_only=True):
    """Let go of the LoRA adapter called ``name``, unless requests still need it."""

    name: str


class Nudge(_Frame, frozen=True, kw_only=True):
    """Look at the account now: somebody waits for memory."""


class HoldSteps(_Frame, frozen=True, kw_only=True):
    """Make no decode step for ``for_s`` from the end of the one in progress on (0: go on), prompts aside. Who has had
    this command tells what its answers have (:class:`TokensMade`)."""

    for_s: float


class DeactivateModel(_Frame, frozen=True, kw_only=True):
    """Drop the model now. Requests still here are named in the answer."""


def build_name(server_args: bytes, limit_bytes: int | None, world: int) -> str:
    """Names what a rank builds for a model with these fields of its :class:`ActivateModel`."""
    return xxhash.xxh3_64_hexdigest(server_args + f"|{limit_bytes}|{world}".encode())


Command = (
    ActivateModel
    | Submit
    | AbortRequest
    | SetKvLimit
    | DropAdapter
    | Nudge
    | HoldSteps
    | DeactivateModel
    | ServeLayers
    | HoldPieces
    | SetRoute
    | GrowRoute
)


# --- to the pool ---


class Parked(_Frame, frozen=True, kw_only=True):
    """A worker without a model, ready for :class:`ActivateModel`. The first message of every worker."""

    worker: str
    pid: int
    owner: str
    """The worker's name in the device's account."""


class EngineInfo(_Frame, frozen=True, kw_only=True):
    """What schedulers must know about an engine. Tokens and bytes are of rank 0's device."""

    kv_bytes_per_token: int
    max_running: int
    chunk_tokens: int
    max_request_tokens: int
    weight_bytes: int
    dtype_bytes: int
    """Of one parameter."""
    from_image: bool
    """Whether the weights came from the host-memory store (False: SGLang's loader read the files)."""
    device_tokens: int = 0
    """Where requests that are larger than the device are served: the most tokens of one that is not; else 0."""
    no_long: str = ""
    """Why such requests are refused although they are allowed; else empty."""
    began_with: list[int] = []
    """Pieces of the model that it began with, the others are to come; empty: all are there."""


class Activated(_Frame, frozen=True, kw_only=True):
    phases: dict[str, float]
    info: EngineInfo
    helped_bytes: dict[str, int] = {}
    """Of the weights, what came over other devices, by these."""


class NotActivated(_Frame, frozen=True, kw_only=True):
    cause: str
    """:class:`prism.engine.errors.ActivationCause`."""
    detail: str
    reusable: bool
    """False: the worker ends itself, since something of the attempt may be left in it."""


class Deactivated(_Frame, frozen=True, kw_only=True):
    """The worker has no model any more and is ready for the next."""

    unfinished: list[str]
    seconds: float
    kept: list[str] = []
    """Names of the builds it keeps (:func:`build_name`): these models come back to it in a fraction of the time."""


class Crashed(_Frame, frozen=True, kw_only=True):
    """The worker's last words after an error inside the engine, or its first when it cannot use its device."""

    reason: str
    suspects: list[str]
    worker: str = ""
    """Of one that never was ready."""
    cuda: int | None = None
    """The result of CUDA that no process survives, if that was it."""


Report = (
    Crashed
    | Parked
    | Activated
    | NotActivated
    | Deactivated
    | Accepted
    | AttemptFirstToken
    | AttemptFinished
    | Lost
    | TokensMade
    | EngineCounters
    | OrderDone
)

encode = msgspec.msgpack.Encoder().encode
command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
report_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
