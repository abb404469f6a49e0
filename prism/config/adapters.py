"""What a LoRA adapter's files say, read from ``adapter_config.json`` and the safetensors header, and what its base
keeps for it. Whatever an engine could not serve, or would serve wrongly, is refused here, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any, Final

import xxhash

from prism.config.errors import ModelFilesError
from prism.config.model_files import model_folder, read_json, safetensors_header
from prism.config.sections.model import AdapterConfig, LoraConfig
from prism.core.specs import LoraRoom, ModelShape

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

LAYER_OF: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "o_proj": "o_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
"""Layer in a checkpoint -> the engine's layer that it is a part of."""

_TENSOR: Final = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(?:language_model\.)?(?:model\.)?"
    r"layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight\Z"
)
_MUST_BE: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}
"""Settings of PEFT that engines do not carry out -> what they must be."""
NOT_SERVED: Final = tuple(key for key in _MUST_BE if key != "peft_type")
"""Settings of PEFT that an adapter must not use."""
_MOST_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """One adapter, as far as it can be served by anybody."""

    folder: Path
    rank: int
    scaling: float
    """What the product of its matrices is multiplied by."""
    dims: Mapping[str, tuple[int, int]]
    """Layers it changes, by their names in checkpoints -> (inputs, outputs)."""
    layers: int
    """One more than the number of the last decoder layer it changes."""
    nbytes: int

    @property
    def modules(self) -> tuple[str, ...]:
        """The engine's layers it changes."""
        return tuple(sorted({LAYER_OF[name] for name in self.dims}))


def adapter_facts(path: str, base: Path, revision: str | None = None, download: bool = True) -> AdapterFacts:
    """Facts of the adapter at ``path`` (relative to ``base``, or a Hugging Face id, which is fetched if it may be).
    Raises :class:`ModelFilesError` with what is missing, broken, or can be served by no engine."""
    folder = model_folder(path, base, revision, download)
    return _facts(folder, _stamps(folder))


def adapter_mark(folder: Path) -> str:
    """Names the bytes of the adapter in ``folder``. Raises :class:`ModelFilesError`."""
    return _mark(folder, _stamps(folder))


_Stamps = tuple[tuple[int, int], ...]


def _stamps(folder: Path) -> _Stamps:
    """Size and time of the adapter's files: one that was replaced is read again."""
    files = [folder / CONFIG_FILE, folder / WEIGHTS_FILE]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelFilesError(f"adapter {folder} has no {' and no '.join(missing)}")
    return tuple((status.st_size, status.st_mtime_ns) for status in (file.stat() for file in files))


@lru_cache(maxsize=4096)
def _facts(folder: Path, _stamps: _Stamps) -> AdapterFacts:
    config, weights = read_json(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    shapes = {name: tuple(entry.shape) for name, entry in safetensors_header(weights).items()}
    rank, scaling = _scale(config, folder)
    dims, layers = _dims(shapes, rank, folder)
    return AdapterFacts(folder, rank, scaling, dims, layers, weights.stat().st_size)


@lru_cache(maxsize=4096)
def _mark(folder: Path, _stamps: _Stamps) -> str:
    digest = xxhash.xxh3_64()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _scale(config: dict[str, Any], folder: Path) -> tuple[int, float]:
    """(Rank, scaling). Raises :class:`ModelFilesError` for a kind of adapter that engines do not run."""
    for key, allowed in _MUST_BE.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ModelFilesError(
                f"adapter {folder}: {key} is {config[key]!r}, which is not served (it must be {allowed[0]!r})"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ModelFilesError(f"adapter {folder}: r is {rank!r}, not a rank")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ModelFilesError(f"adapter {folder}: lora_alpha is {alpha!r}, not a number")
    return rank, alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _dims(shapes: Mapping[str, tuple[int, ...]], rank: int, folder: Path) -> tuple[dict[str, tuple[int, int]], int]:
    """(Inputs and outputs of each kind of layer, number of decoder layers touched)."""
    found: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
    strange = []
    for name, shape in shapes.items():
        match = _TENSOR.match(name)
        if match is None or match[2] not in LAYER_OF:
            strange.append(name)
        else:
            found.setdefault((int(match[1]), match[2]), {})[match[3]] = shape
    if strange or not found:
        shown = ", ".join(sorted(strange)[:_MOST_SHOWN]) or "nothing"
        raise ModelFilesError(
            f"adapter {folder} changes {shown}; adapters of {', '.join(LAYER_OF)} of decoder layers are served"
        )
    dims: dict[str, tuple[int, int]] = {}
    for (layer, module), pair in sorted(found.items()):
        down, up = pair.get("A", ()), pair.get("B", ())
        if len(down) != 2 or len(up) != 2 or down[0] != rank or up[1] != rank:
            raise ModelFilesError(
                f"adapter {folder}: layer {layer} {module} has matrices {down} and {up}, not of rank {rank}"
            )
        if dims.setdefault(module, (down[1], up[0])) != (down[1], up[0]):
            raise ModelFilesError(f"adapter {folder}: {module} differs between decoder layers")
    return dims, 1 + max(layer for layer, _ in found)


def misfits(facts: AdapterFacts, room: LoraRoom | None, shape: ModelShape) -> Iterator[str]:
    """Why engines of a base with ``shape`` that keep ``room`` cannot serve the adapter."""
    if facts.layers > shape.layers:
        yield f"changes decoder layer {facts.layers - 1}, its base has {shape.layers}"
    of_base = layer_dims(shape)
    for module, dims in facts.dims.items():
        if dims != of_base[module]:
            inputs, outputs = of_base[module]
            yield f"{module} has {dims[0]} inputs and {dims[1]} outputs, that of its base {inputs} and {outputs}"
    if room is None:
        yield "its base keeps no room for adapters"
        return
    if facts.rank > room.max_rank:
        yield f"has rank {facts.rank}, its base takes {room.max_rank} at most (lora.max_rank)"
    if beyond := set(facts.modules) - set(room.modules):
        yield f"changes {', '.join(sorted(beyond))}, its base takes {', '.join(room.modules)} (lora.target_modules)"


def layer_dims(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(Inputs, outputs) of each layer that can have an adapter, by its name in checkpoints."""
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (shape.hidden, heads),
        "k_proj": (shape.hidden, kv_heads),
        "v_proj": (shape.hidden, kv_heads),
        "o_proj": (heads, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }


def lora_room(lora: LoraConfig | None, adapters: Sequence[AdapterConfig], base: Path) -> LoraRoom | None:
    """What engines of a model keep for ``adapters`` (files relative to ``base``), as ``lora`` says or as those that can
    be read need it; None when there is nothing to keep."""
    if lora is None and not adapters:
        return None
    lora = lora or LoraConfig()
    known = [facts for adapter in adapters if (facts := _readable(adapter, base)) is not None]
    rank = lora.max_rank or max((facts.rank for facts in known), default=0)
    fitting = [facts for facts in known if facts.rank <= rank]
    modules = {LAYER_OF[name] for name in lora.target_modules or ()}
    if lora.target_modules is None:
        modules = {module for facts in fitting for module in facts.modules}
    return LoraRoom(lora.slots, rank, tuple(sorted(modules))) if rank and modules else None


def _readable(adapter: AdapterConfig, base: Path) -> AdapterFacts | None:
    """None for one that is not here or cannot be served, which is nobody else's problem (its own requests are told)."""
    try:
        return adapter_facts(adapter.adapter, base, adapter.revision, download=False)
    except ModelFilesError:
        return None


def pool_bytes(room: LoraRoom, shape: ModelShape, tp: int) -> int:
    """Device memory of ``room`` over all ``tp`` ranks: for each slot and one more (requests of the base itself) both
    matrices of every layer. Each rank keeps its part of the one that follows the layer's own split, and the other
    whole."""
    heads, both_kv = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    elements = {
        "qkv_proj": 3 * shape.hidden * tp + heads + both_kv,
        "o_proj": heads + shape.hidden * tp,
        "gate_up_proj": 2 * shape.hidden * tp + 2 * shape.intermediate,
        "down_proj": shape.intermediate + shape.hidden * tp,
    }
    each = room.max_rank * sum(elements[module] for module in room.modules)
    return (room.slots + 1) * shape.layers * each * shape.dtype_bytes
