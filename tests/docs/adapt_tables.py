"""Sections of ``docs/models.md`` about quantised checkpoints, adapters, and models that answer with no text."""

from __future__ import annotations

from typing import Final

from prism.config.adapters import LAYER_OF, NOT_SERVED
from prism.core.specs import ModelKind
from prism.server.kinds import ROUTES
from tests.docs.tables import paragraph, table
from tests.engine.test_lora import SHAPES
from tests.engine.test_pooling import FAMILIES
from tests.engine.test_quantised import MADE

QUANTISED: Final = """
The image of a quantised model holds what SGLang's loader made of the checkpoint, with what its kernels were told, so
that nothing is quantised or repacked twice (`prism/engine/module_state.py`); it is for GPUs of the same architecture.
Kernels of these schemes exist for GPUs and for CPUs with AMX only: what is tested here is that everything SGLang's
own methods leave in a layer comes back, byte for byte, with stand-ins for the kernels that quantise and repack. No
answer of a quantised model has been compared yet. Where a loader leaves an object that an image cannot hold, SGLang
loads the model each time, and the log says why.
"""
OTHER_SCHEMES: Final = (
    ("MXFP4 (gpt-oss), FP8 with block scales, experts' layers", "stand-ins of their shape", "test_module_state.py"),
    ("bitsandbytes", "a stand-in for its nested states", "test_module_state.py"),
)
ADAPTERS: Final = """
LoRA adapters in PEFT's form (safetensors) over plain attention, equal to the base with the adapter merged into its
weights (Hugging Face): beside each other and the base in one step, more than there are slots, a hundred at once over
two slots, after being forgotten, on another device, resumed behind tokens of another engine, over two devices (TP),
and over a model that embeds.
"""
VECTORS: Final = """
Models that answer with a vector or scores, equal to Hugging Face at first and from their image. What they are is told
by their files or by `kind` in the catalog; a request of another kind is refused before anything is loaded.
"""
_SHAPE_WORDS: Final = {
    "all": "all layers",
    "low": "queries and values only, of a lower rank than there is room for",
    "keys": "keys and one half of the gated layer",
    "stable": "rank-stabilised scaling (rsLoRA)",
}


def quantised() -> str:
    head = ("scheme", "with", "tested by")
    rows = [(name, "SGLang's own methods", "`tests/engine/test_quantised.py`") for name in MADE]
    rows += [(name, with_, f"`tests/engine/{test}`") for name, with_, test in OTHER_SCHEMES]
    return f"## Quantised checkpoints\n\n{paragraph(QUANTISED)}\n\n{table(head, rows)}"


def adapters() -> str:
    layers = ", ".join(f"`{name}`" for name in LAYER_OF)
    rows = [(_SHAPE_WORDS[shape], "token-equal: `tests/engine/test_lora.py`") for shape in SHAPES]
    rows.append(("over a model that embeds", "equal vectors: `tests/engine/test_pooling.py`"))
    rows += [("`peft_type` other than `LORA`", "refused"), *((f"`{key}`", "refused") for key in NOT_SERVED)]
    rows.append((f"layers other than {layers}", "refused"))
    return f"## Adapters\n\n{paragraph(ADAPTERS)}\n\n{table(('kind of adapter', 'what is tested of it'), rows)}"


def vectors() -> str:
    kinds = {ModelKind(name.partition("-")[0]) for name in FAMILIES}
    rows = [
        (family.config, kind.value, ", ".join(f"`{route}`" for route in ROUTES[kind]))
        for kind in sorted(kinds)
        for name, family in FAMILIES.items()
        if name.startswith(kind.value)
    ]
    rows.append(("Llama (any that generates)", "generate", "`/v1/score`; `/v1/rerank` with a reranker's template"))
    return f"## Vectors and scores\n\n{paragraph(VECTORS)}\n\n{table(('family', 'kind', 'answers at'), rows)}"
