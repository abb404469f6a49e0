"""Models the simulator knows by name, so that a catalog can be simulated without any model file.

Dimensions and parameter counts are those of the public ``config.json`` and model cards. To add a model: add a line to
:data:`_TABLE` (or point the catalog at a folder with the model's files, which are then read instead).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from prism.config.catalog import Catalog, model_spec, spec_with, wanted_dtype
from prism.config.model_files import ModelFacts, engine_dtype_bytes, local_folder
from prism.config.sections.model import ModelConfig
from prism.core.errors import InvalidValue
from prism.core.ids import ModelName
from prism.core.specs import ModelShape, ModelSpec


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One public model in 16-bit weights."""

    name: str
    parameters: float
    shape: ModelShape
    context_tokens: int

    @property
    def weight_bytes(self) -> int:
        return int(self.parameters * self.shape.dtype_bytes)

    def facts(self, dtype: str) -> ModelFacts:
        """Its sizes when the engine computes in ``dtype`` (``auto``: 16 bits)."""
        shape = replace(self.shape, dtype_bytes=engine_dtype_bytes({}, dtype))
        return ModelFacts(shape, int(self.parameters * shape.dtype_bytes), self.context_tokens, "known")


# name, billions of parameters, layers, hidden, heads, KV heads, head dim, intermediate, vocabulary, context (k tokens)
_TABLE: Final = """
meta-llama/Llama-3.2-1B-Instruct      1.236  16 2048 32  8  64  8192 128256 128
meta-llama/Llama-3.2-3B-Instruct      3.213  28 3072 24  8 128  8192 128256 128
meta-llama/Llama-3.1-8B-Instruct      8.030  32 4096 32  8 128 14336 128256 128
meta-llama/Llama-3.3-70B-Instruct    70.554  80 8192 64  8 128 28672 128256 128
meta-llama/Llama-2-7b-chat-hf         6.738  32 4096 32 32 128 11008  32000   4
meta-llama/Llama-2-13b-chat-hf       13.016  40 5120 40 40 128 13824  32000   4
mistralai/Mistral-7B-Instruct-v0.3    7.248  32 4096 32  8 128 14336  32768  32
mistralai/Mistral-Nemo-Instruct-2407 12.248  40 5120 32  8 128 14336 131072 128
mistralai/Mistral-Small-24B-Instruct-2501 23.572 40 5120 32 8 128 32768 131072 32
Qwen/Qwen2.5-0.5B-Instruct            0.494  24  896 14  2  64  4864 151936  32
Qwen/Qwen2.5-1.5B-Instruct            1.544  28 1536 12  2 128  8960 151936  32
Qwen/Qwen2.5-3B-Instruct              3.086  36 2048 16  2 128 11008 151936  32
Qwen/Qwen2.5-7B-Instruct              7.616  28 3584 28  4 128 18944 152064  32
Qwen/Qwen2.5-14B-Instruct            14.770  48 5120 40  8 128 13824 152064  32
Qwen/Qwen2.5-32B-Instruct            32.764  64 5120 40  8 128 27648 152064  32
Qwen/Qwen2.5-72B-Instruct            72.706  80 8192 64  8 128 29568 152064  32
Qwen/Qwen3-0.6B                       0.596  28 1024 16  8 128  3072 151936  40
Qwen/Qwen3-1.7B                       1.721  28 2048 16  8 128  6144 151936  40
Qwen/Qwen3-4B                         4.022  36 2560 32  8 128  9728 151936  40
Qwen/Qwen3-8B                         8.191  36 4096 32  8 128 12288 151936  40
Qwen/Qwen3-14B                       14.768  40 5120 40  8 128 17408 151936  40
Qwen/Qwen3-32B                       32.762  64 5120 64  8 128 25600 151936  40
google/gemma-2-2b-it                  2.614  26 2304  8  4 256  9216 256000   8
google/gemma-2-9b-it                  9.242  42 3584 16  8 256 14336 256000   8
google/gemma-2-27b-it                27.227  46 4608 32 16 128 36864 256000   8
microsoft/Phi-3-mini-4k-instruct      3.821  32 3072 32 32  96  8192  32064   4
microsoft/phi-4                      14.660  40 5120 40 10 128 17920 100352  16
01-ai/Yi-1.5-34B-Chat                34.389  60 7168 56  8 128 20480  64000   4
"""


def _parse(line: str) -> KnownModel:
    name, billions, *dims, context_k = line.split()
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = map(int, dims)
    shape = ModelShape(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab)
    return KnownModel(name, float(billions) * 1e9, shape, int(context_k) * 1024)


MODELS: Final[dict[str, KnownModel]] = {m.name: m for m in map(_parse, _TABLE.strip().splitlines())}


def known_model(name: str) -> KnownModel:
    """The model called ``name``. Raises :class:`InvalidValue` with the known names."""
    try:
        return MODELS[name]
    except KeyError:
        raise InvalidValue("path", name, "the simulator does not know this model", sorted(MODELS)) from None


def known_spec(name: str, path: str, slo_ttft_s: float, slo_tpot_s: float, tp: int = 1) -> ModelSpec:
    """A catalog entry ``name`` for the known model ``path``."""
    model = known_model(path)
    return ModelSpec(
        ModelName(name), path, slo_ttft_s, slo_tpot_s, model.weight_bytes, model.shape, model.context_tokens, tp
    )


def catalog_specs(catalog: Catalog) -> tuple[ModelSpec, ...]:
    """Every model of ``catalog``: known ones from the table, others from their files. Raises ``ModelFilesError``."""
    return tuple(_spec(model, catalog.base) for model in catalog.models)


def _spec(model: ModelConfig, base: Path) -> ModelSpec:
    known = MODELS.get(model.path)
    if known is None or local_folder(model.path, base):
        return model_spec(model, base)
    return spec_with(model, known.facts(wanted_dtype(model)), model.path)
