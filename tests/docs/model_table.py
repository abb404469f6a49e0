"""The tables of ``docs/models.md``, from what the tests are parametrised with and what the engine allows.

``python -m tests.docs.model_table`` writes the document. A kind of model adds a function to :data:`SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from sglang_patches.kv_guard import WORDS
from tests.docs import adapt_tables
from tests.docs.tables import paragraph, table
from tests.engine.families import FAMILIES, PLAIN, REPRESENTS, WINDOWS, Family
from tests.engine.plain_families import EVERY_PLAIN

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"
INTRODUCTION: Final = """
Which families of models Prism serves, what of each is tested, and what is refused. Made by `tests/docs/model_table.py`
from the tables that parametrise the tests; do not edit. Answers are greedy, in float32, of tiny models with random
weights that stand for the families; what is tested of a family is that they are equal.
"""
FULL_KV: Final = """
*Plain* are tested by `tests/engine/test_every_family.py`. Families with sliding windows that SGLang 0.5.16 gives full
KV (Gemma-2, Gemma-3, Cohere-2, EXAONE-4, OLMo-3) are *plain* here too; `disable_hybrid_swa_memory: true` among a
model's `engine_args` has the same done for one of the others. On a CPU stock SGLang itself answers otherwise than
Hugging Face for Cohere-2 (its windows are wider by a token), for Mistral and Phi-3 with windows (it has none), for Phi,
PhiMoE and the dense Granite-4; Prism changes nothing about that.
"""
UNSEEN: Final = """
gpt-oss, Llama-4, MiMo-V2, Gemma-4 and Step-3.5 have the layout of Mellum and have not been tried. SGLang's Triton back
end lets a decoded token see one token less of its window than the same token of a prompt; here both see as many as with
Hugging Face (`sglang_patches/windows.py`), so that requests that were resumed or retracted answer alike.
Qwen3-Next, Nemotron-H, Granite-4-H, Falcon-H1 and Kimi-Linear have states beside KV: their kernels exist for GPUs only,
so that no answer of theirs has been compared yet.
"""
SPECULATION: Final = """
Speculative decoding (NGRAM, EAGLE and the others) is refused, in the catalog (`speculative_algorithm` among a model's
`engine_args`) and by the engine. None of it could be run here: on a CPU SGLang 0.5.16 calls operators that its wheel
does not have (`verify_tree_greedy_cpu`, `assign_extend_cache_locs_cpu`, `fill_accept_out_cache_loc_cpu` and others),
Triton's attention gets a mask of another shape there than it reads, and the corpus of NGRAM does not compile with GCC
12 (`size_t` is not declared). On GPUs three things must be made before it can be allowed. Accepted tokens are drawn
with `torch.rand`, by no request's seed: an answer would neither follow its seed nor go on exactly in another engine
(tokens drawn by seed and position and compared with the drafts would). A step takes slots for all drafts of every
request and gives most of them back: the lease must cover them (`sglang_patches/kv_demand.py` counts one per step). The
draft model's weights and its KV need a region and a group of their own in the account.
"""
IMAGES: Final = """
Models that take images take them here when `server.images.max_count` allows some ([api.md](api.md#images)). A tiny
Gemma-3, a Qwen2-VL (positions in three dimensions) and a LLaVA with Pixtral's encoder are compared with Hugging Face:
requests with one image, with two and with none, together, from files and from the image of weights, and going on in
another engine (`tests/engine/test_images.py`, `tests/engine/test_image_families.py`). Others have not been tried. On a
CPU SGLang 0.5.16 cannot import the processors of Qwen-VL and MiniCPM-V for want of operators that only Qwen-3.5 calls;
Prism declares these (`prism/engine/cpu_operators.py`). LLaVA with CLIP's encoder (1.5) has no case here: SGLang lists
no `CLIPVisionModel`, which `LlavaForConditionalGeneration` looks for, and `LlavaLlamaForCausalLM` puts its encoder on a
GPU while it loads. SGLang's Pixtral encoder uses SiLU whatever a config says.
SGLang's SigLIP encoder uses QuickGELU whatever a config says: on published Gemma-3 models its
log-probabilities are off Hugging Face's by that (0.002 with the tiny one), and Prism changes nothing about it.
"""
BY_NAME: Final = """
Pools are allowed by name (`sglang_patches/kv_guard.py`); any other, one that is not listed here too, is refused when
the model is activated, with its name and before it takes memory.
"""


LAYOUTS: Final = (
    ("K and V per token", "`MHATokenToKVPool`", "all of Prism's engine tests"),
    ("latent rows (MLA)", "`MLATokenToKVPool`", "`tests/engine/test_layouts.py`"),
    ("sliding windows beside full attention", "`SWAKVPool`", "`tests/engine/test_layouts.py`"),
    ("8-bit KV, with the checkpoint's scales", "the same pools", "`tests/engine/test_kv_formats.py`"),
    (
        "KV pages of several tokens",
        "the same pools",
        "`tests/engine/test_kv_formats.py`, `tests/sglang_patches/test_kv_pages.py`",
    ),
    (
        "states of Mamba and linear attention beside KV",
        "`HybridLinearKVPool`, `MambaPool`",
        "SGLang's pools, allocator and prefix cache without its kernels, which need a GPU: "
        "`tests/sglang_patches/test_kv_states.py`",
    ),
)


def layouts() -> str:
    head = ("what attention keeps", "pool of SGLang", "tested by")
    return f"## Layouts\n\n{table(head, LAYOUTS)}"


KEEP_MORE: Final = tuple(family for family in FAMILIES if family.layout != PLAIN)


def families() -> str:
    rows = [(f"{f.serves}", f.layout, _back_end(f), _equal_to(f), _tested(f)) for f in (*EVERY_PLAIN, *KEEP_MORE)]
    head = ("family", "layout", "attention on a CPU", "equal to", "tested")
    return f"## Families\n\n{table(head, rows)}\n\n{paragraph(FULL_KV)}\n\n{paragraph(UNSEEN)}"


def images() -> str:
    return f"## Images\n\n{paragraph(IMAGES)}"


def refused() -> str:
    head = ("class of SGLang", "what it is for")
    rows = sorted((f"`{name}`", words) for name, words in WORDS.items())
    return f"## Refused\n\n{paragraph(BY_NAME)}\n\n{table(head, rows)}\n\n{paragraph(SPECULATION)}"


def _back_end(family: Family) -> str:
    return "Triton, interpreted" if family.engine.get("attention_backend") == "triton" else "torch"


def _equal_to(family: Family) -> str:
    if family.like_hugging_face:
        return "Hugging Face"
    return "SGLang with full KV" if family.layout == WINDOWS else "SGLang again"


def _tested(family: Family) -> str:
    if family.layout == PLAIN:
        return "first answer, from the image on another device beside another model, under pressure"
    tested = "first answer, reactivation from the image after another model"
    if family.config in REPRESENTS.values():
        tested += ", by a worker that keeps it built, on another device beside another model, cached prefixes, "
        tested += "resumption after a kill, retraction"
    return tested


SECTIONS: Final[list[Callable[[], str]]] = [
    layouts,
    families,
    adapt_tables.quantised,
    adapt_tables.adapters,
    adapt_tables.vectors,
    images,
    refused,
]


def render() -> str:
    return "\n\n".join(["# Models", paragraph(INTRODUCTION), *(section() for section in SECTIONS)]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
