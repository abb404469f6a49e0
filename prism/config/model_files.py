"""What a model's files say about its size: read from ``config.json`` and safetensors headers, never from weights.

Nothing here runs until a model is first used, so that a catalog of hundreds of models costs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from prism.config.dimensions import WHOLE, check_dimensions
from prism.config.errors import ModelFilesError
from prism.config.model_kinds import is_sentence_encoder, kind_of, text_config
from prism.core.specs import ModelKind, ModelShape

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
WANTED_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py")
MAX_HEADER_BYTES: Final = 100_000_000
"""Limit of the safetensors format itself."""
MAX_JSON_BYTES: Final = 64 << 20
"""Of config.json and of an index of weights; real ones have a few MiB at most."""
_MOST: Final = 1 << 40
"""No dimension of a model is so large."""

DTYPE_BYTES: Final = {"float16": 2, "half": 2, "bfloat16": 2, "float32": 4, "float": 4}
_FLOATS: Final = {"F64", "F32", "F16", "BF16"}
"""Stored dtypes that the engine casts to its own dtype; others (quantised) stay as they are."""
_STORED_BYTES: Final = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
}
_CONTEXT_KEYS: Final = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
    "n_positions",
)
"""Where SGLang looks, in its order (``n_positions`` is what some configurations call the last but one)."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of one model in the engine's dtype."""

    shape: ModelShape
    weight_bytes: int
    context_tokens: int
    """Longest sequence the model was made for; 0: its configuration leaves it to the architecture's default, which only
    the engine knows."""
    architecture: str
    kind: ModelKind = ModelKind.GENERATE


def local_folder(path: str, base: Path) -> Path | None:
    """The folder ``path`` names (relative to ``base``), or None for a Hugging Face id that is no local folder."""
    folder = (base / Path(path).expanduser()).resolve()
    if folder.is_dir():
        return folder
    if HUB_ID.match(path):
        return None
    raise ModelFilesError(f"model folder {folder} does not exist (and {path!r} is no Hugging Face id like org/model)")


def model_folder(path: str, base: Path, revision: str | None = None, download: bool = True) -> Path:
    """The local folder with the model's files; a Hugging Face id is looked up in its cache and, if allowed, downloaded.

    Raises :class:`ModelFilesError` when it is not there (``download=False``) or cannot be fetched.
    """
    folder = local_folder(path, base)
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download  # slow to import, and most catalogs have local folders

    try:
        found = snapshot_download(
            path, revision=revision, allow_patterns=list(WANTED_FILES), local_files_only=not download
        )
    except Exception as error:
        how = "" if download else f"; fetch it with `hf download {path}`"
        raise ModelFilesError(f"model {path} is not available: {type(error).__name__}: {error}{how}") from error
    return Path(found)


def model_facts(path: str, base: Path, revision: str | None = None, dtype: str = "auto") -> ModelFacts:
    """Facts of the model at ``path``, with ``dtype`` as the engine will be told. A Hugging Face model that is not in
    the local cache is asked for its headers only. Raises :class:`ModelFilesError`."""
    folder = local_folder(path, base)
    if folder is None:
        try:
            folder = model_folder(path, base, revision, download=False)
        except ModelFilesError:
            return _hub_facts(path, revision, dtype)
    return _local_facts(folder, _stamp(folder), dtype)


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of the files that decide the facts: a model that was replaced is read again."""
    try:
        files = [(file.name, file.stat()) for pattern in ("*.json", "*.safetensors") for file in folder.glob(pattern)]
    except OSError as error:  # a link that leads nowhere, or a file that goes away meanwhile
        raise ModelFilesError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return tuple(sorted((name, status.st_size, status.st_mtime_ns) for name, status in files))


@lru_cache(maxsize=4096)
def _local_facts(folder: Path, _stamp: tuple[tuple[str, int, int], ...], dtype: str) -> ModelFacts:
    config, where = read_json(folder / "config.json"), str(folder / "config.json")
    return _checked_facts(config, stored_tensors(folder), dtype, where, is_sentence_encoder(folder))


def stored_tensors(folder: Path) -> dict[str, tuple[str, Sequence[int]]]:
    """(Stored dtype, shape) of every tensor of the model in ``folder``. Raises :class:`ModelFilesError`."""
    headers = [safetensors_header(file) for file in _weight_files(folder)]
    return {name: (entry.dtype, entry.shape) for header in headers for name, entry in header.items()}


@lru_cache(maxsize=4096)
def _hub_facts(repo: str, revision: str | None, dtype: str) -> ModelFacts:
    from huggingface_hub import get_safetensors_metadata, hf_hub_download

    try:
        config = read_json(Path(hf_hub_download(repo, "config.json", revision=revision)))
        metadata = get_safetensors_metadata(repo, revision=revision)
    except Exception as error:
        raise ModelFilesError(
            f"model {repo}: its sizes cannot be read from Hugging Face: {type(error).__name__}: {error}"
        ) from error
    files = metadata.files_metadata.values()
    tensors = {name: (info.dtype, info.shape) for file in files for name, info in file.tensors.items()}
    return _checked_facts(config, tensors, dtype, f"{repo}/config.json")


def _checked_facts(
    config: dict[str, Any],
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    dtype: str,
    where: str,
    sentence_encoder: bool = False,
) -> ModelFacts:
    facts = facts_from(config, list(tensors.values()), dtype, where, sentence_encoder)
    whole = {name: dims for name, (stored, dims) in tensors.items() if stored in WHOLE}
    check_dimensions(text_config(config), facts.shape, whole, where)
    return facts


def facts_from(
    config: dict[str, Any],
    tensors: Sequence[tuple[str, Sequence[int]]],
    dtype: str,
    where: str,
    sentence_encoder: bool = False,
) -> ModelFacts:
    """Facts from a parsed ``config.json`` and the (stored dtype, shape) of every tensor. ``sentence_encoder``: see
    :func:`prism.config.model_kinds.is_sentence_encoder`."""
    text = text_config(config)
    dtype_bytes = engine_dtype_bytes({**config, **text}, dtype)
    try:
        shape, context_tokens = _shape(text, dtype_bytes), _context_tokens(text)
        architectures = config.get("architectures") or [config.get("model_type", "unknown")]
        architecture = str(architectures[0])
        if not all(0 < size < _MOST for size in _sizes(shape)) or not 0 <= context_tokens < _MOST:
            raise ValueError(f"not all of them are positive and less than {_MOST}")
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelFilesError(
            f"{where}: the model's dimensions cannot be read: {type(error).__name__}: {error}"
        ) from error
    weight_bytes = sum(
        prod(dims) * (dtype_bytes if kind in _FLOATS else _STORED_BYTES.get(kind, 1)) for kind, dims in tensors
    )
    return ModelFacts(shape, weight_bytes, context_tokens, architecture, kind_of(config, sentence_encoder))


def _sizes(shape: ModelShape) -> tuple[int, ...]:
    """The dimensions that decide how much memory a model takes."""
    kept = (shape.latent or shape.kv_heads * shape.head_dim, shape.attention_weights or 1)
    return shape.layers, shape.hidden, shape.heads, *kept, shape.head_dim, shape.intermediate, shape.vocab


def announced(path: str, base: Path, revision: str | None = None) -> tuple[int, ModelKind]:
    """Context length and kind of the model at ``path`` by its ``config.json``. Raises :class:`ModelFilesError`, also
    for one that is not on this machine."""
    folder = model_folder(path, base, revision, download=False)
    config = model_config(folder)
    return _context_tokens(text_config(config)), kind_of(config, is_sentence_encoder(folder))


def model_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json``. Raises :class:`ModelFilesError`."""
    return read_json(folder / "config.json")


def _context_tokens(config: Mapping[str, Any]) -> int:
    """As SGLang's ``get_context_length`` reads it: positions, times the factor of scalings that do not say what they
    started from."""
    positions = next((int(config[key]) for key in _CONTEXT_KEYS if config.get(key)), 0)
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if "original_max_position_embeddings" in scaling or kind in ("llama3", "yarn", "longrope"):
        return positions  # transformers fills in where yarn and longrope started
    factor = scaling.get("factor", 1)
    return int(positions * factor) if isinstance(factor, int | float) else positions


def engine_dtype_bytes(config: dict[str, Any], dtype: str) -> int:
    """Bytes per element of weights and KV for the engine's ``dtype``; ``auto``: as the model was saved."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return DTYPE_BYTES.get(stored, 2)


def _shape(config: Mapping[str, Any], dtype_bytes: int) -> ModelShape:
    heads = int(config.get("num_attention_heads") or config["n_head"])
    hidden = int(config.get("hidden_size") or config["n_embd"])
    intermediate = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    if config.get("moe_intermediate_size") and config.get("num_experts_per_tok"):
        # Step time follows the experts a token visits, not all that exist.
        intermediate = config["moe_intermediate_size"] * config["num_experts_per_tok"]
    attention = _latent_attention if config.get("kv_lora_rank") else _plain_attention
    return ModelShape(
        layers=int(config.get("num_hidden_layers") or config["n_layer"]),
        hidden=hidden,
        heads=heads,
        intermediate=int(intermediate),
        vocab=int(config["vocab_size"]),
        dtype_bytes=dtype_bytes,
        **attention(config, heads, hidden),
    )


def _plain_attention(config: Mapping[str, Any], heads: int, hidden: int) -> dict[str, int]:
    kv_heads = config.get("num_key_value_heads") or (1 if config.get("multi_query") else heads)
    return {"kv_heads": int(kv_heads), "head_dim": int(config.get("head_dim") or hidden // heads)}


def _latent_attention(config: Mapping[str, Any], heads: int, hidden: int) -> dict[str, int]:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): queries and the latent row are projected down and up
    again, and the row is what a token keeps."""
    rank, rotary = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    plain = int(config.get("qk_nope_head_dim") or 0)
    value = int(config.get("v_head_dim") or plain or rank)
    query_rank = int(config.get("q_lora_rank") or 0)
    queries = heads * (plain + rotary)
    down_up = query_rank * (hidden + queries) if query_rank else hidden * queries
    latents = hidden * (rank + rotary) + rank * heads * (plain + value)
    return {
        "kv_heads": 1,
        "head_dim": -(-(plain + rotary + value) // 2),
        "latent": rank + rotary,
        "attention_weights": down_up + latents + heads * value * hidden,
    }


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelFilesError(f"{index}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ModelFilesError(f"{index}: names a file outside of the folder: {outside[0]!r}")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelFilesError(f"{folder} has no safetensors files; Prism loads weights from safetensors only")
    return files


_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_HEADER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TENSOR: Final = msgspec.json.Decoder(_Tensor)


def safetensors_header(file: Path) -> dict[str, _Tensor]:
    """The tensors in the header of one file: an 8-byte little-endian length, then JSON. Raises
    :class:`ModelFilesError`."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ModelFilesError(f"{file}: is not a safetensors file (header of {length} bytes)")
            header = _HEADER.decode(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _TENSOR.decode(entry) for name, entry in header.items()}
    except msgspec.ValidationError as error:
        raise ModelFilesError(f"{file}: its header is not a safetensors header: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{file}: its header cannot be read: {error}") from error
    for name, entry in tensors.items():
        each, (start, stop) = _STORED_BYTES.get(entry.dtype), entry.data_offsets
        if each is not None and prod(entry.shape) * each != stop - start:
            raise ModelFilesError(f"{file}: {name} has the bytes {start} to {stop}, not as many as its shape needs")
    end = max((entry.data_offsets[1] for entry in tensors.values()), default=0)
    if size != 8 + length + end:
        raise ModelFilesError(f"{file}: has {size} bytes but its header describes {8 + length + end}; copy it again")
    return tensors


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``. Raises :class:`ModelFilesError`."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelFilesError(f"{file}: is larger than {MAX_JSON_BYTES >> 20} MiB")
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{file}: is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelFilesError(f"{file}: is not a JSON object")
    return data
