"""Sections of ``docs/models.md`` about quantised checkpoints, adapters, and models that answer with no text."""

from __future__ import annotations

from typing import Final

from prism.config.adapters import LAYER_OF, NOT_SERVED
from prism.core.specs import ModelKind
from prism.server.kinds import ROUTES
from tests.docs.tables import paragraph, table
from tests.engine.quantised_models import FORMATS
from tests.engine.test_lora import SHAPES
from tests.engine.test_pooling import FAMILIES

QUANTISED: Final = """
The image of a quantised model holds what SGLang's loader made of the checkpoint, with what its kernels were told, so
that nothing is quantised or repacked twice (`prism/engine/module_state.py`); it is for GPUs of the same architecture.
On a CPU without AMX SGLang 0.5.16 by itself computes three of the formats below, in part under Triton's interpreter;
answers are its own. For the others Prism has operators in torch (`sglang_patches/quantised_operators.py`), over which
SGLang's own quantised layers run; answers are those of Hugging Face's model that computes as the checkpoint means, but
for what 16 bits cost. *Answers* are tested at first, from the image on another device beside another model, and after
memory has shrunk. Experts' layers have such operators for MXFP4 only, where SGLang makes them 16-bit when it loads
them; `prism config check --files` says so. Kernels of GPUs have not been run yet: of these it is tested that all that
SGLang's methods leave in a layer comes back, byte for byte, with stand-ins for what quantises and repacks
(`tests/engine/test_quantised.py`). Where a loader leaves an object that an image cannot hold, SGLang loads the model
each time, and the log says why. SGLang's Llama, on every device, loses the scales of FP8 and int8 blocks
(`weight_scale_inv`), so that these are tested with Qwen-3.
"""
OTHER_SCHEMES: Final = (
    ("MXFP4 (gpt-oss)", "answers of the weights that it means", "test_quantised_answers.py"),
    ("compressed-tensors, 4 bits; AWQ and GPTQ for Marlin", "images of SGLang's own methods", "test_quantised.py"),
    ("FP8 with block scales, experts' layers", "images of stand-ins of their shape", "test_module_state.py"),
    ("bitsandbytes", "images of a stand-in for its nested states", "test_module_state.py"),
)
NO_CPU: Final = """
What SGLang by itself said of a tiny checkpoint of each format on this CPU, where it has no answer:
"""
STOCK_SAYS: Final = (
    ("FP8, ModelOpt FP8", "`name 'sgl_per_tensor_quant_fp8' is not defined`", "torch's operators"),
    ("FP8 by blocks, w4afp8", "`Fp8LinearMethod on CPU requires that CPU has AMX support`", "torch's, but w4afp8"),
    ("w8a8_int8", "`W8A8Int8LinearMethod on CPU only works on AMX or Arm64`", "torch's operators"),
    ("blockwise_int8", "`'NoneType' object has no attribute 'replace'` (a GPU's name)", "torch's operators"),
    ("compressed-tensors", "`Found no NVIDIA driver on your system` (its capability)", "torch's, but with 4 bits"),
    ("GPTQ", "`Could not run 'sgl_kernel::gptq_shuffle'`", "torch's operators"),
    ("AWQ", "`Could not run 'sglang::awq_dequantize'`", "torch's operators"),
    ("MXFP4 (gpt-oss)", "`InterpreterError: unsupported operand type(s) for %: 'int' and 'constexpr'`", "torch's"),
    ("MXFP8", "`Only weight_block_size[0] == weight_block_size[1] is supported`", "GPUs only"),
    ("bitsandbytes 0.50, 4 bits", "`Found no NVIDIA driver on your system` (`.cuda()` while it loads)", "GPUs only"),
    ("auto-round", "`check_marlin_supported`: `unsupported operand type(s) for *: 'NoneType' and 'int'`", "GPUs only"),
    ("Quark FP8", "`'<=' not supported between instances of 'int' and 'NoneType'` (a capability)", "GPUs only"),
    (
        "compressed-tensors, FP8 weights alone",
        "`CompressedTensorsW4A16Sparse24 is not supported now`",
        "not here either",
    ),
    ("NVFP4 when it is loaded", "`supported only on NVIDIA Blackwell SM100/SM103 GPUs`", "such GPUs only"),
    ("torchao (int8wo)", "`cannot import name 'float8_dynamic_activation_float8_weight'` (0.17)", "on no device"),
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
    answers = "`tests/engine/test_quantised_answers.py`"
    own = {True: "answers of SGLang by itself", False: "answers, over torch's operators"}
    rows = [(made.words, own[made.stock], answers) for made in FORMATS.values()]
    rows += [(name, with_, f"`tests/engine/{test}`") for name, with_, test in OTHER_SCHEMES]
    formats = table(("format", "what is compared", "tested by"), rows)
    said = table(("format", "SGLang's words", "with Prism, on a CPU"), STOCK_SAYS)
    return f"## Quantised checkpoints\n\n{paragraph(QUANTISED)}\n\n{formats}\n\n{paragraph(NO_CPU)}\n\n{said}"


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
