"""Orders: what the controller tells node agents, and operators the controller (:mod:`prism.wire.messages`)."""

from __future__ import annotations

import msgspec

from prism.core.instances import InstanceKey, Parts
from prism.core.settings import LiveMode
from prism.core.specs import ModelSpec
from prism.wire.message import Message


class Companion(msgspec.Struct, frozen=True, kw_only=True):
    """Another instance that could run layers for the one that is activated, in its :class:`ActivateCommand`."""

    key: InstanceKey
    device: str
    pipeline: int | None = None
    """The execution pipeline that it is to be in; None: it was not ordered together with the one that is activated."""


class ActivateCommand(Message, frozen=True, kw_only=True):
    """Controller to node agent: make those parts of the instance ready that stand on your machine. Every machine of
    the instance gets one."""

    command: str
    """Unique id; the answer carries it and a repeated command is answered again, not carried out again."""
    reply_to: str
    key: InstanceKey
    parts: Parts
    """All of the instance's, on whichever machine: a part may have to find the others."""
    reason: str
    spec: ModelSpec
    """The catalog's entry as of this decision: agents hold no catalog of their own."""
    kv_cap_bytes: int | None = None
    """Fixed KV share on each device; None: elastic."""
    mark: str = ""
    """Fingerprint of the model's weights; "": nobody knows it, they can only come from the model's folder."""
    plans: list[bytes] = []
    """This node's parts of the multicasts that bring the weights (:class:`prism.transfer.session.NodePlan`, encoded),
    one per rank; none: they are here, or nobody has them."""
    peers: dict[str, str] = {}
    """Weight servers of the other nodes, for what is in the model's folder beside weights."""
    live: LiveMode = LiveMode.WHOLE
    """Whether its engines may serve before their weights are here."""
    companions: list[Companion] = []
    """With ``live`` other than whole: whom it can ask for the layers that it lacks."""
    pipeline: int = 0
    """The execution pipeline that it is to be in (:mod:`prism.policy.live.pipelines`), of those of this decision."""
    turn: int = 0
    """With which of ``turns`` chunks of its layers it begins, where they do not come in the order of a plan."""
    turns: int = 1
    leads: bool = True
    """False: layers that its pipeline needs come to it before embedding and head do. It runs them for the others, and
    leads requests of its own when these are there, too."""


class DeactivateCommand(Message, frozen=True, kw_only=True):
    """Controller to node agent: let your parts of the instance leave. ``carry`` moves running requests elsewhere with
    their tokens at once; otherwise they finish first."""

    command: str
    reply_to: str
    key: InstanceKey
    carry: bool


class ShareQueue(Message, frozen=True, kw_only=True):
    """Controller to node agent: hand all but ``kept_share`` of the requests that wait for the instance on ``device``
    to the inactive queue; others of its model have come up. Not repeated: a queue that is not shared out is only
    slower."""

    key: InstanceKey
    device: str
    kept_share: float


class ForgetAdapter(Message, frozen=True, kw_only=True):
    """Controller to node agent: engines of ``model`` let go of the LoRA adapter called ``adapter``, unless requests
    still need it; one that comes brings it back."""

    model: str
    adapter: str


class Distribute(Message, frozen=True, kw_only=True):
    """Controller to node agent: take part in a multicast as a source. ``part`` is an encoded
    :class:`prism.transfer.session.NodePlan`. A lost message costs order, not correctness: receivers pull."""

    part: bytes


class BringKv(Message, frozen=True, kw_only=True):
    """Controller to node agent: an instance of ``model``, which your machine has, has left others and stored its KV
    there, or these leave the fleet; bring what is worth it. A lost message costs time: what is missing is computed."""

    model: str
    mark: str
    """Fingerprint of its weights."""
    peers: dict[str, str]
    """Weight servers of the machines that it left, by node."""


class KvTakers(Message, frozen=True, kw_only=True):
    """Controller to a node agent that leaves, for each report with KV: who was told to bring it (:class:`BringKv`)."""

    takers: dict[str, str]
    """Nodes by the fingerprint of the weights; "": none can. Without those for which a controller that has not
    heard of all machines yet knows nobody."""


class CopyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A pack that is to come into the node's host memory, in a :class:`KeepCopies`."""

    mark: str
    layout: str
    nbytes: int
    model: str
    """The catalog's name."""
    source: str = ""
    """The node that sends it; "": it is on the node's own disk."""
    address: str = ""
    """``HOST:PORT`` of the source's weight server."""


class KeepCopies(Message, frozen=True, kw_only=True):
    """Controller to node agent: the node's part of the fleet's parameter pool. Sent again now and then; the newest
    counts, and one that was lost delays a repair."""

    keep: list[tuple[str, str]]
    """Fingerprints and layouts of copies in host memory that leave last."""
    fetch: list[CopyOrder] = []
    """What is to come; an order that is being carried out is not begun again."""
    spare_s: float
    """Other copies leave when nobody has used them for so long."""


class AdminCommand(Message, frozen=True, kw_only=True):
    """An operator's wish, as it stands in the command stream. The controller answers with
    :class:`prism.wire.messages.CommandResult` to ``reply_to``; a command read after ``deadline_s`` is answered with an
    error and not carried out (nobody waits for it any more)."""

    command: str
    reply_to: str
    verb: str
    """``load``, ``unload``, ``pin``, ``unpin``, ``drain``, ``undrain``, ``reload``, ``plan``."""
    deadline_s: float
    """Unix time."""
    model: str = ""
    adapter: str = ""
    """``unload``: of the model only this LoRA adapter."""
    devices: list[str] = []
    """``load``: where (empty: the scheduler chooses); ``drain``/``undrain``: which devices; ``unload``: from where
    (empty: everywhere)."""
    carry: bool = False
    """``unload``/``drain``: move running requests with their tokens instead of letting them finish."""
    reason: str = ""
    instances: int = 1
    """``load``: so many of the model."""
