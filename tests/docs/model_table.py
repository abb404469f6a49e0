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

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"
INTRODUCTION: Final = """
Which families of models Prism serves, what of each is tested, and what is refused. Made by `tests/docs/model_table.py`
from the tables that parametrise the tests; do not edit. Answers are greedy, in float32, of tiny models with random
weights that stand for the families; what is tested of a family is that they are equal.
"""
FULL_KV: Final = """
Families with sliding windows that SGLang 0.5.16 gives full KV (Gemma-2, Gemma-3, Cohere-2, EXAONE-4, OLMo-3) are
*plain* here too; `disable_hybrid_swa_memory: true` among a model's `engine_args` has the same done for one of the
others.
"""
UNSEEN: Final = """
gpt-oss, Llama-4, MiMo-V2, Gemma-4 and Step-3.5 have the layout of Mellum and have not been tried. SGLang's Triton back
end lets a decoded token see one token less of its window than the same token of a prompt; here both see as many as with
Hugging Face (`sglang_patches/windows.py`), so that requests that were resumed or retracted answer alike.
Qwen3-Next, Nemotron-H, Granite-4-H, Falcon-H1 and Kimi-Linear have states beside KV: their kernels exist for GPUs only,
so that no answer of theirs has been compared yet.
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


def families() -> str:
    rows = [(f"{f.serves}", f.layout, _back_end(f), _equal_to(f), _tested(f)) for f in FAMILIES]
    head = ("family", "layout", "attention on a CPU", "equal to", "tested")
    return f"## Families\n\n{table(head, rows)}\n\n{paragraph(FULL_KV)}\n\n{paragraph(UNSEEN)}"


def refused() -> str:
    head = ("class of SGLang", "what it is for")
    rows = sorted((f"`{name}`", words) for name, words in WORDS.items())
    return f"## Refused\n\n{paragraph(BY_NAME)}\n\n{table(head, rows)}"


def _back_end(family: Family) -> str:
    return "Triton, interpreted" if family.engine.get("attention_backend") == "triton" else "torch"


def _equal_to(family: Family) -> str:
    if family.like_hugging_face:
        return "Hugging Face"
    return "SGLang with full KV" if family.layout == WINDOWS else "SGLang again"


def _tested(family: Family) -> str:
    tested = "first answer, reactivation from the image"
    if family.layout != PLAIN:
        tested += " after another model"
    if family.config in REPRESENTS.values():
        tested += ", on another device beside another model, cached prefixes, resumption after a kill, retraction"
    return tested


SECTIONS: Final[list[Callable[[], str]]] = [
    layouts,
    families,
    adapt_tables.quantised,
    adapt_tables.adapters,
    adapt_tables.vectors,
    refused,
]


def render() -> str:
    return "\n\n".join(["# Models", paragraph(INTRODUCTION), *(section() for section in SECTIONS)]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
