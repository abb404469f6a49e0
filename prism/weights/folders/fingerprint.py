"""One name for a model's weights on every machine.

Hashing a hundred gigabytes to name them would cost what packing saves, so the fingerprint covers the configuration,
every safetensors header (names, types, shapes, offsets) and a sample of each tensor: its first, middle and last
kilobyte. Two models that differ in training differ there. Nothing of the machine (paths, times) enters.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

import xxhash

from prism.weights.folders.safetensors_folder import SourceTensor, read_folder, weight_files

_SAMPLE_BYTES: Final = 1024
_CONFIGS: Final = ("config.json", "quantization_config.json", "hf_quant_config.json", "quantize_config.json")


def fingerprint(folder: Path, cache: Path | None = None) -> str:
    """32 hexadecimal digits that name the weights in ``folder``. With ``cache`` (a folder, usually the store's) the
    result is remembered for as long as names, sizes and modification times stay. Raises
    :class:`~prism.weights.errors.BadModelFolder`."""
    folder = folder.resolve()
    if cache is None:
        return _compute(folder)
    state = _state(folder)
    remembered = cache / ".fingerprints" / f"{xxhash.xxh3_128_hexdigest(str(folder).encode())}.json"
    try:
        known = json.loads(remembered.read_text())
        if known["state"] == state:
            return str(known["fingerprint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    result = _compute(folder)
    remembered.parent.mkdir(parents=True, exist_ok=True)
    temporary = remembered.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"folder": str(folder), "state": state, "fingerprint": result}))
    temporary.replace(remembered)
    return result


def _state(folder: Path) -> list[list[object]]:
    """What changes when the folder's weights are replaced: name, size and time of each file that matters."""
    files = [folder / name for name in _CONFIGS if (folder / name).exists()] + weight_files(folder)
    stats = [(f.name, f.stat()) for f in files]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _compute(folder: Path) -> str:
    tensors = read_folder(folder)
    digest = xxhash.xxh3_128()
    for name in _CONFIGS:
        if (folder / name).exists():
            digest.update(name.encode() + (folder / name).read_bytes())
    for file in weight_files(folder):
        mine = sorted((t for t in tensors if t.file == file), key=lambda t: t.offset)
        with file.open("rb", buffering=0) as stream:
            for tensor in mine:
                digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
                for at in _samples(tensor):
                    digest.update(os.pread(stream.fileno(), min(_SAMPLE_BYTES, tensor.nbytes), at))
    return digest.hexdigest()


def _samples(tensor: SourceTensor) -> list[int]:
    last = tensor.offset + max(0, tensor.nbytes - _SAMPLE_BYTES)
    return sorted({tensor.offset, (tensor.offset + last) // 2, last})
