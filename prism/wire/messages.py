"""Every message between Prism's processes, encoded as MessagePack by :func:`encode` and :func:`decode`.

Who talks to whom (mailboxes are ZeroMQ PULL sockets whose addresses stand in Redis)::

    front door --(Redis stream entry: Submission)--> device queue / inactive queue
    front door --Cancel, ResumeReply--> node agent
    node agent --ResumeQuery, Finish, Failed--> front door
    engine worker --Tokens--> front door                 (straight: no hop on the token path)
    front door --(Redis stream entry: AdminCommand)--> controller
    controller --ActivateCommand, DeactivateCommand, Distribute, KeepCopies, BringKv,
               KvTakers, ShareQueue--> node agent
    node agent --CommandResult, AgentReport--> controller
    controller --CommandResult--> front door             (answer to an AdminCommand)

A request may be run by several engines one after the other. Each try is an *attempt*: the front door numbers
them, hands the tokens it already has to the next one, and drops what a superseded attempt still sends.
Rules of change: fields are only added, with a default; a change of meaning is a new message, and a new
:data:`prism.wire.message.PROTOCOL_VERSION`. All machines of a fleet speak the same version: one that does not is
refused when it joins (:mod:`prism.supervisor.node`) and gets no work from the controller
(:mod:`prism.controller.versions`).

Here is what requests and reports need; orders are in :mod:`prism.wire.commands`, the parts of reports in
:mod:`prism.wire.reports`.
"""

from __future__ import annotations

import msgspec

from prism.wire.commands import (
    ActivateCommand,
    AdminCommand,
    BringKv,
    DeactivateCommand,
    Distribute,
    ForgetAdapter,
    KeepCopies,
    KvTakers,
    ShareQueue,
)
from prism.wire.message import Message
from prism.wire.reports import (
    ArrivalReport,
    DeviceStatus,
    EngineDeath,
    InstanceReport,
    LinkReport,
    PackReport,
    Stillborn,
)


class Submission(Message, frozen=True, kw_only=True):
    """A request as it stands in a Redis stream until its last token is acknowledged."""

    id: str
    model: str
    front: str
    """Mailbox address of the front-door worker that holds the client's connection."""
    arrival_s: float
    """Unix time at which the front door had read the request."""
    prompt_tokens: int
    max_new_tokens: int
    slo_ttft_s: float
    slo_tpot_s: float
    max_wait_s: float
    late: str
    """``serve`` or ``reject`` (:class:`prism.core.specs.LatePolicy`)."""
    payload: bytes
    """The engine's request: SGLang's ``TokenizedGenerateReqInput`` in SGLang's own MessagePack coding. Opaque to all
    but the front door and the engine worker (``prism.engine.sglang_codec``)."""
    hops: int = 0
    """How often a scheduler moved the request to another queue; bounds a tour of devices that keep losing the model."""
    suspicions: int = 0
    """Engines that died by themselves in a step of this request (:mod:`prism.node.suspects`)."""
    died_of: str = ""
    """What the latest of the engines that died with it said."""


# --- to a front-door worker ---


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request."""

    id: str
    attempt: int
    start: int
    """Index of the first of ``token_ids`` among all generated tokens of the request, earlier attempts included."""
    token_ids: list[int]
    finish: dict[str, object] | None
    """SGLang's finish reason (``{"type": "stop", ...}``), None while the request runs."""
    cached_tokens: int
    engine_time_s: float
    """Unix time at which the engine produced these tokens, for the log: TTFT and TPOT are judged at the client."""
    extra: bytes
    """Log-probabilities and the like, for ``prism.engine.sglang_codec``; empty for plain requests."""


class Tokens(Message, frozen=True, kw_only=True):
    """Engine worker to front door: one decode step's tokens for the requests of that front door."""

    engine: str
    items: list[TokenItem]


class ResumeQuery(Message, frozen=True, kw_only=True):
    """Node agent to front door: I am about to run ``id`` again; which tokens did the client's stream already get?"""

    id: str
    reply_to: str


class Finish(Message, frozen=True, kw_only=True):
    """Node agent to front door: the engine says that ``id`` is complete; may I acknowledge it?

    ``final`` is the encoded :class:`Tokens` with the last item, which the front door takes in like any other (it drops
    what it has by index). It answers with :class:`ResumeReply`: ``complete`` when it holds every token; when earlier
    ones are missing it waits a moment for what is still on its way before it answers ``complete=False`` and the tokens
    it has, so that the request is run again from there. Sent again until it is answered.
    """

    id: str
    reply_to: str
    attempt: int
    total_tokens: int
    final: bytes


class Failed(Message, frozen=True, kw_only=True):
    """The request ends with an error (the front door renders the OpenAI error object)."""

    id: str
    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


# --- to a node agent ---


class Cancel(Message, frozen=True, kw_only=True):
    """The client went away (or an operator asked): stop the request wherever it is and acknowledge it."""

    id: str
    reason: str


class ResumeReply(Message, frozen=True, kw_only=True):
    """Answer to :class:`ResumeQuery`. ``known`` is False when the front door has no such request (its client is
    gone)."""

    id: str
    known: bool
    attempt: int = 0
    """Number of the attempt that may run now; tokens of older ones are dropped from here on."""
    token_ids: list[int] = []
    complete: bool = False
    """The stream has its finish reason and every token: acknowledge the request."""


class AgentReport(Message, frozen=True, kw_only=True):
    """Node agent to controller, every second, at once when an instance comes or goes, when a model reaches its
    keep-alive and when a device has become short of memory: all of the node's state. A new ``incarnation`` means that
    the agent was restarted and nothing of the old one is left."""

    node: str
    protocol: int = 1
    """The agent's :data:`prism.wire.message.PROTOCOL_VERSION`; agents before the second said nothing."""
    incarnation: str
    mailbox: str
    devices: list[DeviceStatus]
    instances: list[InstanceReport]
    arrivals: dict[str, int] = {}
    """Requests per model that entered the node's device queues from a front door since the last report."""
    stillborn: list[Stillborn] = []
    """The latest of them: a report may be lost, so that each stands in many."""
    deaths: list[EngineDeath] = []
    """The latest of each model, since the agent started."""
    leaving: bool = False
    """The node is about to leave: its models and requests should go elsewhere."""
    left: bool = False
    """The node's last report: nothing of it is left."""
    weights: str = ""
    """``HOST:PORT`` of the node's weight server; "": it has none."""
    packs: list[PackReport] = []
    arriving: list[ArrivalReport] = []
    host_bytes: int = 0
    """Host memory that may be used for weights; 0: it keeps none for others."""
    disk_bytes_s: float = 0.0
    """Rate of the disk under the node's store; 0: not measured."""
    link_bytes_s: float = 0.0
    """Fastest rate at which weights came from another node; 0: none came yet."""
    links: list[LinkReport] = []
    """Per sending node from which something came, newest rate only."""
    kv_bytes: int = 0
    """Host memory that KV may take there; 0: none is kept."""
    kv_held: dict[str, int] = {}
    """Of a node that leaves and runs nothing any more: bytes of KV by fingerprint of the weights. It stays until others
    have it, for a bounded time."""
    kv_failed: dict[str, list[str]] = {}
    """Nodes that it has given up as takers of it (:class:`prism.wire.commands.KvTakers`), by the same."""


class CommandResult(Message, frozen=True, kw_only=True):
    """How a command ended. Not ``ok``: it was refused or failed, as ``error`` says, and nothing changed."""

    command: str
    ok: bool
    error: str = ""
    phases: dict[str, float] = {}
    """Seconds each phase of an activation took, by name."""
    early: bool = False
    """The instance serves before all its weights are there."""
    whole_only: str = ""
    """Why no instance of its model can serve before its weights are there, as an engine said; "": it can."""
    detail: dict[str, object] = {}
    """What the operator is shown, for example the plan with its reasons."""


AnyMessage = (
    Submission
    | Tokens
    | ResumeQuery
    | Finish
    | Failed
    | Cancel
    | ResumeReply
    | ActivateCommand
    | DeactivateCommand
    | ForgetAdapter
    | ShareQueue
    | Distribute
    | KeepCopies
    | BringKv
    | KvTakers
    | CommandResult
    | AgentReport
    | AdminCommand
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """The message's bytes on the wire."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """The message in ``data``. Raises :class:`msgspec.ValidationError` or ``DecodeError`` on anything malformed."""
    return _decoder.decode(data)
