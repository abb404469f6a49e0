"""How a worker builds the engine of a model: SGLang's scheduler, its weights and its seat."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from prism import memory
from prism.engine.commands import ActivateModel
from prism.engine.delivery import Delivery
from prism.engine.frames import FrameSocket
from prism.engine.images import draft_keys, image_keys
from prism.engine.seat import WorkerSeat, cut_to_memory
from prism.engine.sglang_process import platform_of, prepare_ranks
from prism.engine.weight_seat import EngineWeights
from prism.weights.folders.fingerprint import fingerprint
from prism.weights.loading.links import LoadLinks
from prism.weights.store.weight_store import WeightStore


@dataclass
class ActiveModel:
    """One activation: the objects that must be gone before the next."""

    command: ActivateModel
    scheduler: Any
    seat: WorkerSeat
    weights: EngineWeights
    mark: str
    """The weights' fingerprint."""


class Phases:
    """Seconds between marks."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._last_s = time.perf_counter()

    def done(self, name: str) -> None:
        now_s = time.perf_counter()
        self.phases[name] = now_s - self._last_s
        self._last_s = now_s


@dataclass(frozen=True)
class EngineBuilder:
    """Everything of one worker that its engines stand on."""

    device: memory.Device
    gpu_index: int
    owner: memory.Owner
    arena: memory.Arena
    capacity_bytes: int
    store: WeightStore | None
    channel: FrameSocket
    delivery: Delivery

    def mark(self, command: ActivateModel) -> str:
        """The weights' fingerprint; "" for those that no image is kept of."""
        found = self._mark_of(Path(msgspec.json.decode(command.server_args)["model_path"]))
        return found or command.mark  # a folder without weights belongs to a model whose pack comes from elsewhere

    def _mark_of(self, folder: Path) -> str:
        cache = None if self.store is None else self.store.directory
        # Other kinds of files, and models named by their hub id, are SGLang's to find; no image is kept of them.
        return fingerprint(folder, cache=cache) if any(folder.glob("*.safetensors")) else ""

    def build(self, command: ActivateModel, mark: str, clock: Phases, links: LoadLinks) -> ActiveModel:
        """The engine of a model whose weights have the fingerprint ``mark``, ready to run. Raises what SGLang raises;
        then no memory is held."""
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.server_args import PortArgs, ServerArgs

        arguments = msgspec.json.decode(command.server_args)
        server_args = ServerArgs(**arguments)
        clock.done("arguments")
        arguments |= {"dtype": server_args.dtype}
        weights = self._weights(command, mark, arguments, links)
        if arguments.get("speculative_draft_model_path"):
            weights.draft = self._draft(command, arguments)
        clock.done("reserve")
        guesser_bytes = 0 if weights.draft is None else weights.draft.expected_bytes
        # SGLang cuts and refuses requests by what it believes to have; one that it lets in must fit some day. Weights
        # and KV have pages of their own.
        page_bytes = self.device.page_bytes
        weight_pages = -(-weights.expected_bytes // page_bytes) + -(-guesser_bytes // page_bytes)
        capacity = max(0, self.capacity_bytes // page_bytes - weight_pages) * page_bytes
        if command.limit_bytes is not None:
            capacity = min(capacity, command.limit_bytes // page_bytes * page_bytes)
        seat = WorkerSeat(self.channel, self.delivery, command, self.owner, self.arena, capacity, weights, self.device)
        server_args.prism_seat = seat
        port_args = PortArgs(
            tokenizer_ipc_name="",
            scheduler_input_ipc_name="",
            detokenizer_ipc_name="",
            nccl_port=0,
            rpc_ipc_name="",
            metrics_ipc_name="",
            tokenizer_worker_ipc_name=None,
            decoupled_spec_ipc_config=None,
        )
        port_args.prism_seat = seat
        if command.world > 1:
            prepare_ranks(command)
        try:
            scheduler = Scheduler(server_args, port_args, self.gpu_index, command.rank, 0, 0, 0, 0, None)
        except BaseException:
            weights.release()
            raise
        clock.done("construct")
        seat.scheduler = scheduler
        cut_to_memory(scheduler)
        return ActiveModel(command, scheduler, seat, weights, mark)

    def _weights(self, command: ActivateModel, mark: str, arguments: dict[str, Any], links: LoadLinks) -> EngineWeights:
        key = image_keys(mark, command.world, arguments)[command.rank]
        store = self.store if mark else None
        estimate = (_stored_bytes(arguments["model_path"]) or command.weight_bytes) // command.world
        platform = platform_of(arguments["device"], self.gpu_index)
        first, turn = command.first_pieces, (command.turn, command.turns)
        owner, most = self.owner, self.capacity_bytes
        return EngineWeights(
            owner, store, key, command.model, most, estimate, platform, first_pieces=first, links=links, turn=turn
        )

    def _draft(self, command: ActivateModel, arguments: dict[str, Any]) -> EngineWeights:
        """Of the model that guesses."""
        path = arguments["speculative_draft_model_path"]
        mark = self._mark_of(Path(path))
        key = draft_keys(mark, command.world, arguments)[command.rank]
        platform = platform_of(arguments["device"], self.gpu_index)
        store, label = self.store if mark else None, f"{command.model} (guesses)"
        estimate = _stored_bytes(path) // command.world
        return EngineWeights(self.owner, store, key, label, self.capacity_bytes, estimate, platform)


def _stored_bytes(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
