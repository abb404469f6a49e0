"""What a Prism worker process offers to the patches inside it.

A worker hangs its seat on ``server_args.prism_seat`` and ``port_args.prism_seat`` before it constructs SGLang's
scheduler. In processes that are not Prism's nothing is patched at all: see :func:`sglang_patches.install`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from prism import memory
from prism.memory.rows import PoolRows, RowNumbers
from prism.policy.long_prompts import LongShape, TierRoom, TierVerdict, WindowPlan
from prism.remote.orders import Order


class TensorMemory(Protocol):
    """Memory of the device's account for tensors."""

    def allocate(self, nbytes: int) -> Any:
        """A flat ``uint8`` tensor of ``nbytes``."""
        ...


class WeightSeat(TensorMemory, Protocol):
    """Where this activation's weights live and where they come from."""

    from_image: bool
    """Whether :meth:`fill` will fill them."""

    @property
    def beside(self) -> TensorMemory:
        """For what is no part of the model's weights and goes with it (slots for adapters): in no image."""
        ...

    draft: WeightSeat | None
    """Of the model that guesses for this one; None: there is none."""

    def fill(self, model: Any) -> bool:
        """Fill the parameters of ``model`` (all allocated here) from a stored image. False: there is none; load."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]] | None:
        """Every tensor of the model's files by name, from a pack of them; None when there is none. Valid until
        :meth:`loaded`."""
        ...

    @property
    def identity(self) -> str:
        """Names the parameters and how they are split and typed; "" when it is not known whose they are."""
        ...

    def hold(self, model: Any, wanted: Callable[[str], bool]) -> None:
        """Have the parameters ``wanted`` by name in memory and no others: those have no elements."""
        ...

    def loading(self, model: Any) -> None:
        """SGLang's loader is about to fill ``model``, which is as its construction left it."""
        ...

    def processed(self, module: Any) -> None:
        """SGLang is done with the weights of one module (quantised them, laid them out for kernels): adopt them, and
        give back what they were made of."""
        ...

    def arrived(self, piece: int) -> bool:
        """Whether :meth:`bring` would not wait for the piece (:mod:`prism.remote.pieces`)."""
        ...

    @property
    def arrived_bytes(self) -> int:
        """Of the image, in host memory; grows whenever something arrives."""
        ...

    def tend(self) -> None:
        """See to it that what has not arrived does. Raises when nobody can."""
        ...

    def bring(self, model: Any, piece: int) -> None:
        """Have the parameters of the piece in memory, beside those that are there."""
        ...

    def loaded(self, model: Any) -> None:
        """SGLang's loader has filled ``model``: adopt what it left outside the region and store an image."""
        ...


class KvStore(Protocol):
    """What the seat offers for KV outside the engine (:class:`prism.kv.keeper.KvKeeper`)."""

    leave_s: float
    """A model that leaves takes so long at most to store what it has cached."""

    def attach(self, rows: PoolRows) -> None: ...
    def attach_points(
        self, kind: str, rows: PoolRows, most_rows: int, rows_of: Callable[[RowNumbers], RowNumbers]
    ) -> None: ...
    @property
    def attached(self) -> bool: ...
    def step(self) -> None: ...
    def keep_is_worth(self, tokens: int) -> bool: ...
    def trip_s(self, tokens: int) -> float: ...
    def keep(self, tokens: Any, rows: RowNumbers, adapter: str, first: int, limit_s: float) -> int: ...
    def keep_soon(self, tokens: Any, rows: RowNumbers, adapter: str, first: int) -> None: ...
    def keep_point(self, tokens: Any, rows: RowNumbers, adapter: str) -> None: ...
    def reach(self, tokens: Any, adapter: str, have: int) -> int: ...
    def point_tokens(self, have: int, end: int) -> int: ...
    def fetch(self, tokens: Any, adapter: str, have: int, end: int, rows: RowNumbers) -> int: ...
    def note_prefill(self, tokens: int, took_s: float) -> None: ...
    def close(self) -> None: ...


class UnitStore(Protocol):
    """One long prompt's KV outside the engine (:class:`prism.kv.long_store.LongStore`)."""

    def put(self, unit: tuple[int, int], data: Any) -> None: ...
    def drop(self, units: Sequence[tuple[int, int]]) -> None: ...
    def read(self, unit: tuple[int, int]) -> AbstractContextManager[Any]: ...
    def answer(self) -> None: ...
    @property
    def host_bytes(self) -> int: ...
    @property
    def lent_bytes(self) -> int: ...
    def close(self) -> None: ...


class UnitTiers(Protocol):
    """Where long prompts may have KV (:class:`prism.kv.long_store.LongTiers`)."""

    brought_bytes: int

    @property
    def ahead(self) -> int: ...
    @property
    def lent_bytes(self) -> int: ...
    def rooms(self) -> Sequence[TierRoom]: ...
    def begin(self, shape: LongShape, plan: WindowPlan, tokens: int) -> UnitStore | TierVerdict: ...
    def close(self) -> None: ...


class Seat(Protocol):
    """One worker's place: its messages, its memory, its outputs. ``rank`` and ``world`` are tensor-parallel."""

    rank: int
    world: int
    draft_rows: Any
    """KV of a model that guesses for the other (:class:`sglang_patches.spec_draft.ModelRows`), when it is loaded; None:
    there is none."""
    fair: bool
    """Requests take turns (:mod:`sglang_patches.fair`)."""
    kv_groups: list[memory.KvGroup]
    """The pools of the model's attention state, in the order in which SGLang made them; empty before."""

    def receive_frames(self) -> list[bytes]:
        """Commands that arrived on rank 0, undecoded; never waits."""
        ...

    def decode(self, frames: Sequence[bytes]) -> list[Any]:
        """The commands as SGLang objects, on every rank alike."""
        ...

    def called(self) -> bool:
        """Whether a command has come that was not received."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a command is here or ``timeout_s`` has passed; whether one is."""
        ...

    def held_s(self) -> float:
        """For how long no decode step is to be made yet; 0: they may."""
        ...

    def resumed(self, rid: str) -> Sequence[int]:
        """Tokens that earlier attempts of the request generated; empty for a fresh one."""
        ...

    def emit(self, output: Any) -> None:
        """Outputs of one step (``BatchTokenIDOutput``), or the ``AbortReq`` of a request that was only queued."""
        ...

    def take_adapter(self, lora_id: str) -> tuple[str, int] | None:
        """Make the adapter ready for a request that is here; or why it cannot be, with an HTTP status."""
        ...

    def reject(self, rid: str, message: str, status: int) -> None:
        """End one request with an error of its own."""
        ...

    def stepped(self, scheduler: Any) -> None:
        """Called once per scheduling step, for load reports."""
        ...

    @property
    def weights(self) -> WeightSeat: ...

    loading: WeightSeat
    """Those of the model that SGLang builds now: ``weights``, or their ``draft``."""

    kv: KvStore | None
    """Where KV outlives the engine; None: nowhere."""

    long_tiers: UnitTiers | None
    """Where prompts that are larger than the device have KV; None: they are refused."""

    def take_orders(self) -> Sequence[Order]:
        """What arrived about layers in other engines, to be carried out now."""
        ...

    def ordered(self, number: int, error: str, whole_only: bool = False) -> None:
        """An order was carried out, or not (``error``); ``whole_only``: nor will any other be."""
        ...

    first_pieces: Sequence[int]
    """The engine was begun with these pieces of its model; empty: with all."""

    def watch(self, fd: int) -> None:
        """From now on :meth:`wait` ends when ``fd`` can be read, too."""
        ...

    def unwatch(self, fd: int) -> None: ...

    def lent_owner(self) -> memory.Owner:
        """A new owner in the device's account, for what is kept for another engine."""
        ...

    @property
    def owner(self) -> memory.Owner: ...

    @property
    def kv_arenas(self) -> list[memory.Arena]:
        """The worker's, and those of further groups, in the order of the groups."""
        ...

    @property
    def kv_capacity_bytes(self) -> int:
        """The most KV memory this activation could ever hold on its device."""
        ...
