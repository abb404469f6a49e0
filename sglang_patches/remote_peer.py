"""The peer's side: layers of this engine run for the requests of others, on KV of their own."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from prism import memory
from prism.memory.errors import OutOfMemory
from prism.remote.link import PeerLink, Received
from prism.remote.messages import (
    VERSION,
    FetchKv,
    HiddenStates,
    KvRows,
    Leading,
    Measured,
    MeasureLink,
    PeerHello,
    PeerWelcome,
    Refused,
    RunPieces,
)
from sglang_patches.remote_batches import BatchPart, forward_batch
from sglang_patches.remote_check import BadMessage, check_state, check_work
from sglang_patches.remote_memory import ForeignKv
from sglang_patches.remote_pieces import ModelPieces
from sglang_patches.remote_tensors import pack_tensors, unpack_tensors

log = logging.getLogger(__name__)

MEASURED_BYTES: Final = 1 << 20
"""Of a measurement, at most."""


class ForeignWork:
    """What leaders ask of this engine, in the order in which it came. It never waits for anybody, so that engines that
    lead and serve each other cannot stop each other."""

    def __init__(
        self, scheduler: Any, pieces: ModelPieces, me: str, model: str, new_owner: Callable[[], memory.Owner]
    ) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self._config = scheduler.model_config
        self._none = scheduler.spec_algorithm
        self._pieces, self._me, self._model, self._new_owner = pieces, me, model, new_owner
        self.held = frozenset(range(pieces.count))
        """Pieces whose weights are here."""
        self._slots: dict[PeerLink, int] = {}
        self._names: WeakKeyDictionary[PeerLink, str] = WeakKeyDictionary()
        self._leading: WeakSet[PeerLink] = WeakSet()
        self._kv: dict[PeerLink, ForeignKv] = {}
        self._queue: deque[tuple[PeerLink, Received]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def leaders(self) -> list[str]:
        """Engines whose routes lead over this one now."""
        return sorted(link.label or self._names[link] for link in self._leading if not link.closed)

    def take(self, link: PeerLink, received: Received) -> None:
        """A message that is for the peer's side."""
        match received.message:
            case PeerHello() as hello:
                self._greet(link, hello)
            case MeasureLink(batch=batch, nbytes=nbytes):
                sent = torch.zeros(min(max(nbytes, 0), MEASURED_BYTES) // 4, dtype=torch.float32)
                link.send(Measured(batch=batch), pack_tensors([sent]))
            case Leading(now=now) if link in self._slots:
                (self._leading.add if now else self._leading.discard)(link)
            case _:
                self._queue.append((link, received))

    def _greet(self, link: PeerLink, hello: PeerHello) -> None:
        problem = ""
        if hello.version != VERSION:
            problem = f"it speaks version {hello.version}, this engine {VERSION}"
        elif not self._model or hello.model != self._model:
            problem = f"its weights are {hello.model or 'unknown'}, this engine's {self._model or 'unknown'}"
        elif hello.slots < 2:
            problem = f"it has {hello.slots} slots"
        if problem:
            link.send(Refused(batch=0, reason=problem))
            return
        self._slots[link], self._names[link] = hello.slots, hello.engine
        link.send(PeerWelcome(version=VERSION, engine=self._me, pieces=sorted(self.held)))

    def forget_closed(self) -> None:
        """Give back what was kept for leaders that are gone, and what this device's own engines want."""
        for link in [link for link in self._slots if link.closed]:
            del self._slots[link]
            self._drop(link)
        for link in [link for link, kv in self._kv.items() if kv.wanted_back]:
            self._drop(link)
            link.close("its memory is wanted back")
            self._slots.pop(link, None)

    def _drop(self, link: PeerLink) -> None:
        if (kv := self._kv.pop(link, None)) is not None:
            kv.close()

    def drop_all(self) -> None:
        """The pieces that are here change, or this engine ends: its leaders must begin again."""
        for link in list(self._slots):
            link.close("the layers of this engine have changed")
        self.forget_closed()
        self._queue.clear()

    def serve(self, most: int) -> int:
        """Answer up to ``most`` messages; how many there were."""
        served = 0
        while self._queue and served < most:
            link, received = self._queue.popleft()
            if not link.closed:
                self._answer(link, received)
                served += 1
        return served

    def _answer(self, link: PeerLink, received: Received) -> None:
        batch = getattr(received.message, "batch", 0)
        try:
            if isinstance(received.message, RunPieces):
                state = self._run(link, received, received.message)
                link.send(HiddenStates(batch=batch), pack_tensors(t for t in state if t is not None))
            elif isinstance(received.message, FetchKv):
                link.send(KvRows(batch=batch), pack_tensors(self._fetch(link, received.message)))
            else:
                raise BadMessage(f"a peer is not sent {type(received.message).__name__}")
        except OutOfMemory as error:
            self._drop(link)
            link.send(Refused(batch=batch, reason=f"no memory for its KV: {error}"))
        except Exception as error:
            log.exception("work for %s was not done", link.peer)
            link.send(Refused(batch=batch, reason=f"{type(error).__name__}: {error}"[:500]))

    def _kv_of(self, link: PeerLink) -> ForeignKv:
        kv = self._kv.get(link)
        if kv is None:
            if link not in self._slots:
                raise BadMessage("it has not said who it is")
            layers = [piece - 1 for piece in self.held if 1 <= piece <= self._pieces.layers]
            if not layers:
                raise BadMessage("this engine has no layers")
            kv = ForeignKv(self._runner, self._new_owner(), min(layers), max(layers) + 1, self._slots[link])
            self._kv[link] = kv
            kv.back([0])
        return kv

    def _run(self, link: PeerLink, received: Received, work: RunPieces) -> tuple[Any, Any]:
        kv = self._kv_of(link)
        table = kv.rows.req_to_token
        bounds = (table.shape[0], table.shape[1], kv.slots, self._config.vocab_size)
        check_work(work, self.held - {self._pieces.count - 1}, *bounds)
        tensors = unpack_tensors(received, self._runner.device)
        check_state(tensors, work.first, len(work.token_ids), self._config.hidden_size, self._runner.dtype)
        kv.back(work.out_slots)
        if not kv.has(work.table_slots):
            raise BadMessage("its request table names slots that nothing was written to")
        state = None if not tensors else (tensors[0], tensors[1] if len(tensors) > 1 else None)
        return self._forward(kv, work, state)

    def _forward(self, kv: ForeignKv, work: RunPieces, state: tuple[Any, Any] | None) -> tuple[Any, Any]:
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad():
            batch = self._batch(kv, work)
            kv.backend.init_forward_metadata(batch)
            with forward_context(ForwardContext(attn_backend=kv.backend)):
                ids, positions = batch.input_ids, batch.positions
                found: tuple[Any, Any] = self._pieces.run(work.first, work.end, state, ids, positions, batch)
        return found

    def _batch(self, kv: ForeignKv, work: RunPieces) -> Any:
        """SGLang's ``ForwardBatch`` of the work; the request table gets the slots of its tokens."""
        device = self._runner.device
        entries = torch.tensor(work.table_slots, dtype=torch.int32, device=device)
        kv.rows.req_to_token[work.table_rows, work.table_positions] = entries
        part = BatchPart(
            rows=work.rows,
            seq_lens=work.seq_lens,
            out_slots=work.out_slots,
            positions=work.positions,
            token_ids=work.token_ids,
            prefix_lens=work.prefix_lens,
            extend_lens=work.extend_lens,
        )
        return forward_batch(part, device, self._none)

    def _fetch(self, link: PeerLink, wanted: FetchKv) -> tuple[Any, Any]:
        kv = self._kv.get(link)
        if kv is None or not kv.first <= wanted.first_layer < wanted.end_layer <= kv.end:
            raise BadMessage(f"there is no KV of layers [{wanted.first_layer}, {wanted.end_layer}) for it here")
        if not wanted.slots or not 0 <= min(wanted.slots) <= max(wanted.slots) < kv.slots or not kv.has(wanted.slots):
            raise BadMessage("it asks for KV of slots that nothing was written to")
        return kv.read(wanted.first_layer, wanted.end_layer, wanted.slots)
