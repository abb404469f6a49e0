"""LoRA adapters of one engine. A request names its adapter (:class:`~prism.wire.adapters.AdapterRef`), wherever it
runs; an engine reads an adapter that it does not know when the first such request arrives, and forgets those that were
used longest ago.

An adapter is in two places: in the engine's process as SGLang keeps it, ready to be copied (:class:`EngineAdapters`),
and, for the steps of its requests, in one of the slots in device memory, which SGLang gives out least recently used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from prism.config.adapters import (
    CONFIG_FILE,
    LAYER_OF,
    WEIGHTS_FILE,
    AdapterFacts,
    adapter_facts,
    layer_dims,
    misfits,
)
from prism.config.errors import ModelFilesError
from prism.config.model_files import facts_from, model_folder, read_json
from prism.core.errors import InvalidValue
from prism.core.specs import LoraRoom, ModelShape
from prism.wire.adapters import AdapterRef

KEPT_PER_SLOT: Final = 4
"""Adapters that a process keeps, for each that may be in device memory at a time."""


class AdapterRefused(Exception):
    """Requests of an adapter cannot run on this engine."""

    def __init__(self, why: str, status: HTTPStatus = HTTPStatus.SERVICE_UNAVAILABLE) -> None:
        super().__init__(why)
        self.status = status


class EngineAdapters:
    """The adapters of the engine that ``scheduler`` (SGLang's) runs. All ranks take the same calls between the same
    steps, and keep the same adapters."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager: Any = getattr(scheduler.tp_worker.model_runner, "lora_manager", None)
        self._used: OrderedDict[str, None] = OrderedDict()

    def take(self, lora_id: str) -> None:
        """A request of the adapter ``lora_id`` is here: it is ready for the next step from now on. Raises
        :class:`AdapterRefused`."""
        if lora_id not in self._used:
            try:
                ref = AdapterRef.of(lora_id)
            except InvalidValue as error:
                raise AdapterRefused(str(error), HTTPStatus.BAD_REQUEST) from error
            if self._manager is None:
                raise AdapterRefused(
                    f"the adapter {ref.name!r} came after its base was loaded; unload the base once to make room for it"
                )
            self._load(ref)
            self._used[lora_id] = None
            self._forget_oldest({lora_id, *self._needed()})
        self._used.move_to_end(lora_id)

    def resident(self) -> list[str]:
        """Names of the adapters in device memory."""
        slots = () if self._manager is None else self._manager.memory_pool.uid_to_buffer_id
        return sorted(AdapterRef.of(uid).name for uid in slots if uid is not None)

    def _load(self, ref: AdapterRef) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        try:
            facts = adapter_facts(ref.folder, Path("/"))
            shape, engine = self._shape(), self._engine_shape()
        except ModelFilesError as error:
            raise AdapterRefused(str(error)) from error
        for why in misfits(facts, self._room(), shape):
            raise AdapterRefused(f"the adapter {ref.name!r} {why}")
        config = {**read_json(facts.folder / CONFIG_FILE), "target_modules": list(facts.dims)}
        config["lora_alpha"] = facts.scaling * facts.rank
        try:
            tensors = dict(whole_layers(facts, engine))
        except (OSError, SafetensorError) as error:
            raise AdapterRefused(f"the adapter {ref.name!r} cannot be read: {error}") from error
        result = self._manager._load_lora_adapter_from_tensors(
            LoRARef(lora_id=ref.id, lora_name=ref.id, lora_path=ref.folder, pinned=False), tensors, config
        )
        if not result.success:
            for half_way in (self._manager.configs, self._manager.loras):
                half_way.pop(ref.id, None)
            raise AdapterRefused(f"the adapter {ref.name!r} cannot be loaded: {result.error_message}")

    def _room(self) -> LoraRoom:
        """What is left for adapters when the base's own requests have their slot."""
        manager = self._manager
        modules = tuple(sorted(manager.target_modules))
        return LoraRoom(manager.max_loras_per_batch - 1, manager.max_lora_rank, modules)

    def _shape(self) -> ModelShape:
        args = self._scheduler.server_args
        file = model_folder(args.model_path, Path("/"), args.revision, download=False) / "config.json"
        return facts_from(read_json(file), [], args.dtype, str(file)).shape

    def _engine_shape(self) -> ModelShape:
        """SGLang makes some dimensions larger for CPUs and uneven ranks."""
        config = self._manager.base_hf_config.to_dict()
        return facts_from(config, [], self._scheduler.server_args.dtype, "the engine's configuration").shape

    def _forget_oldest(self, needed: set[str]) -> None:
        """Never one of ``needed``."""
        for lora_id in list(self._used):
            if len(self._used) <= KEPT_PER_SLOT * self._room().slots:
                return
            if lora_id not in needed:
                self._drop(lora_id)

    def forget(self, name: str) -> bool:
        """Drops every version of the adapter called ``name`` that no request here needs; False if one does."""
        needed = set(self._needed())
        found = [lora_id for lora_id in self._used if AdapterRef.of(lora_id).name == name]
        for lora_id in found:
            if lora_id not in needed:
                self._drop(lora_id)
        return not needed.intersection(found)

    def _drop(self, lora_id: str) -> None:
        result = self._manager._unload_lora_adapter(self._manager.lora_refs[lora_id])
        if not result.success:
            raise RuntimeError(f"SGLang does not let go of an adapter: {result.error_message}")
        del self._used[lora_id]

    def _needed(self) -> Iterator[str]:
        scheduler = self._scheduler
        batches = (scheduler.running_batch, scheduler.last_batch, scheduler.cur_batch_for_debug)
        requests = [req for batch in batches if batch is not None for req in batch.reqs]
        requests += [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
        requests += [scheduler.chunked_req] if scheduler.chunked_req is not None else []
        if (long := getattr(scheduler, "prism_long", None)) is not None:
            requests += long.requests
        return (req.lora_id for req in requests if req.lora_id is not None)


def whole_layers(facts: AdapterFacts, engine: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's matrices by name, as wide as layers of an engine of shape ``engine`` (which may be padded), with
    zeros for parts of an engine's layer that the adapter leaves as they are: SGLang takes queries, keys and values
    together, and both halves of a gated layer."""
    from safetensors import safe_open

    dims = layer_dims(engine)
    with safe_open(facts.folder / WEIGHTS_FILE, framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        part = next(module for module in LAYER_OF if f".{module}." in name)
        for module in (m for m in LAYER_OF if LAYER_OF[m] == LAYER_OF[part]):
            inputs, outputs = dims[module]
            shape = (facts.rank, inputs) if ".lora_A." in name else (outputs, facts.rank)
            beside = name.replace(f".{part}.", f".{module}.")
            if module == part:
                whole[name] = _padded(tensor, shape)
            elif beside not in found and beside not in whole:
                whole[beside] = torch.zeros(*shape, dtype=tensor.dtype)
    yield from whole.items()


def _padded(tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """``tensor`` with zeros behind its rows and columns up to ``shape``."""
    if tuple(tensor.shape) == shape:
        return tensor
    found = torch.zeros(*shape, dtype=tensor.dtype)
    found[: tensor.shape[0], : tensor.shape[1]] = tensor
    return found
