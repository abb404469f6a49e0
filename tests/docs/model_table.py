"""The tables of ``docs/models.md``, from what the tests are parametrised with and what the engine allows.

``python -m tests.docs.model_table`` writes the document. A kind of model adds a function to :data:`SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from prism.config.unserved import UNSERVED, Unserved
from sglang_patches.kv_guard import WORDS
from tests.docs import adapt_tables
from tests.docs.tables import paragraph, table
from tests.engine.families import PLAIN, REPRESENTS, TRITON_ONLY, Family
from tests.engine.plain_families import EVERY_PLAIN

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "models.md"
INTRODUCTION: Final = """
Which families of models Prism serves, what of each is tested, and what is refused. Made by `tests/docs/model_table.py`
from the tables that parametrise the tests; do not edit. Answers are greedy, in float32, of tiny models with random
weights that stand for the families; what is tested of a family is that they are equal.
"""
FULL_KV: Final = """
Families with torch are tested by `tests/engine/test_every_family.py`, others by `tests/engine/test_layouts.py`.
Families with sliding windows that SGLang 0.5.16 gives full KV (Gemma-2, Gemma-3, Cohere-2, EXAONE-4, OLMo-3) are
*plain* here too; `disable_hybrid_swa_memory: true` among a model's `engine_args` has the same done for one of the
others. On a CPU stock SGLang itself answers otherwise than Hugging Face for Cohere-2 (its windows are wider by a
token), for Mistral and Phi-3 with windows (it has none), for Gemma-2 (`torch_native` does not cap scores; `triton`
does, and so does a prompt larger than its device), for EXAONE-4, Phi, PhiMoE and the dense Granite-4; Prism
changes nothing about that, and *SGLang by itself* means that answers are those of SGLang without Prism.
"""
WINDOWS_ON_A_CPU: Final = """
*Triton's, in torch*: SGLang's Triton back end, whose attention virtual devices compute in torch
(`sglang_patches/host_attention.py`); Triton's interpreter, which SGLang by itself runs there, takes a hundred times as
long.

SGLang's Triton back end lets a decoded token see one token less of its window than the same token of a prompt; here
both see as many as with Hugging Face (`sglang_patches/windows.py`), so that requests that were resumed or retracted
answer alike. MiMo's own configurations are code of their repositories: `trust_remote_code: true` among `engine_args`.
Families with states beside KV (Qwen3-Next, Nemotron-H, Granite-4-H, Falcon-H1, LFM2, Kimi-Linear) have kernels for GPUs
only, so that no answer of theirs has been compared yet; their pools, allocator, leases and prefix cache are tested
without kernels, and `scripts/gpu` compares Qwen3-Next's answers with those of SGLang by itself.

SGLang by itself serves OLMo-3 on no device, since its configuration was written for Transformers 4, and MiniMax-M2 and
the experts of ERNIE-4.5 on GPUs only: Prism mends the one (`sglang_patches/olmo3.py`) and has operators for CPUs for
the others (`sglang_patches/host_operators.py`). Of OLMo-3 with YaRN SGLang scales the layers without a window and
Transformers all of them, so that its answers have not been compared.
Classes of Transformers that SGLang has no model for (SmolLM3,
Seed-OSS, ERNIE-4.5, Helium, Jais-2, CWM, dots.llm1, Solar-Open, HyperCLOVA X, BitNet) are run by it with its own
attention.
"""
NOT_ON_A_CPU: Final = """
What SGLang 0.5.16 by itself could not load or run when a tiny model of the family was tried, with its own words
(`prism/config/unserved.py`); `prism config check --files` says so of a catalog's models. Those that fail on CPUs alone
are served on GPUs through the same pools as the families above, and no answer of theirs has been compared.
"""
SPECULATION: Final = """
Engines of a model with plain attention guess tokens when the catalog says so (`speculative: {algorithm: ngram}`): what
followed the last tokens in the engine's answers so far (SGLang's NGRAM), as a tree that one step checks. No answer
depends on it: the token behind each node is drawn by the request's seed and position as ever, and a guess is accepted
if it is that token (`sglang_patches/spec_sampling.py`; SGLang draws by `torch.rand`, and on a CPU takes the likeliest
token whatever is asked for). Greedy and sampled answers, filters, biases, grammars, resumed
requests, retraction and log-probabilities are those of an engine without guesses
(`tests/engine/test_speculation.py`); requests
with penalties get one token a step, so that these count every token. Slots of guesses are the model's own KV, under its
lease. The table of n-grams is host memory, bounded by `speculative.ngrams`; it forgets when the model leaves. Such
engines run without overlap and are built anew when their model comes back. On a CPU, operators that SGLang's wheel
does not have are written in torch (`sglang_patches/spec_operators.py`), and torch's attention sees trees
(`sglang_patches/spec_host.py`); on GPUs SGLang's own are used, which nobody has run yet. The first engine with guesses
on a machine compiles SGLang's table, which takes half a minute and a C++ compiler. Refused by `prism config check
--files`: other attention states, models that take images, pages of several tokens, turns (`scheduling: fair`).

A small model can guess instead (`speculative: {algorithm: eagle, draft: FOLDER}`, or `eagle3`), one that was made for
the model: it sees what the model's last layer, or several of them, made of a token. All of the above holds for it, and
is tested with drafts that are fitted to a demo model. Its K and V lie in the slots of the model's own tokens, behind
the model's (`sglang_patches/spec_draft.py`), so that pages, lease, wishes and account are one; its weights are charged
with the model's, have an engine image of their own, and come and go with the model's. The embedding and the head that
SGLang takes from the model are in no image of the draft. `prism config check --files` compares both: the sizes of
states and vocabulary, the classes, the layers that an EAGLE-3 draft sees, its heads and the devices. Drafts are read
from safetensors only, like all models, on every machine from the same path. On a CPU torch does what SGLang has
kernels for (`sglang_patches/spec_branches.py`). Refused: drafts of other kinds (a whole small model, DFLASH, a model's
own layers for the next token, NEXTN), tables of frequent tokens, other back ends or types for the draft.
"""
IMAGES: Final = """
Models that take images take them here when `server.images.max_count` allows some ([api.md](api.md#images)). A tiny
Gemma-3, a Qwen2-VL (positions in three dimensions), a Qwen2.5-VL (windows in its encoder), a Qwen3-VL (its encoder's
layers go into several of the decoder's), a LLaVA with Pixtral's encoder and a Mistral-3 are compared with Hugging Face:
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
SPARSE: Final = """
What DSA would need (DeepSeek-V3.2, GLM-5): beside the latents of 64 tokens lies a page of their index, whole for each
layer, for which a slot whose tokens follow each other has no place. It is a second group whose slots come and go with
those of the first, and SGLang's sparse kernels, which no CPU runs, would have to read latents that lie a token apart.
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
        "`tests/sglang_patches/test_kv_states.py`, `test_kv_move_states.py`",
    ),
)


_IN_ENGINES: Final = (
    "`test_under_pressure_running_requests_are_retracted`",
    "`test_on_another_device_beside_another_model_with_cached_prefixes`",
    "`test_resumed_after_the_engine_was_killed`",
)
_PAGES: Final = "`test_pages_of_tokens_answer_alike_and_go_when_they_are_not_needed`"
_EIGHT_BIT: Final = "`test_eight_bit_kv_takes_a_quarter_and_answers_alike_after_reactivation`"
HELD: Final = (
    ("latent rows", "`test_kv_lease.py`", "`test_kv_lease.py`", *_IN_ENGINES),
    ("windows", "`test_kv_groups.py`", "`test_what_both_groups_lack_is_one_wish`", *_IN_ENGINES),
    (
        "states",
        "`test_states_of_waiting_requests_are_leased_before_they_start`",
        "the lease of `test_what_both_groups_lack_is_one_wish`",
        "the lease of `test_above_its_limit_the_larger_group_shrinks`",
        "`test_cached_states_go_when_others_wait`",
        "on GPUs only",
    ),
    ("pages of tokens", "`test_kv_pages.py`", "`test_pages_of_tokens_are_counted_whole`", _PAGES, _PAGES, _PAGES),
    ("8-bit KV", "`test_kv_lease.py`", "`test_kv_lease.py`", _EIGHT_BIT, _EIGHT_BIT, _EIGHT_BIT),
)
"""Layout, and the tests (or files of them) by what they show."""


def layouts() -> str:
    head = ("what attention keeps", "pool of SGLang", "tested by")
    held = table(("layout", "slots and leases", "wishes", "retraction", "prefix cache", "resumption"), HELD)
    return f"## Layouts\n\n{table(head, LAYOUTS)}\n\n{held}"


def families() -> str:
    rows = [(f"{f.serves}", f.layout, _back_end(f), _equal_to(f), _tested(f)) for f in (*EVERY_PLAIN, *TRITON_ONLY)]
    head = ("family", "layout", "attention on a CPU", "equal to", "tested")
    away = table(("family", "layout", "where not", "why"), [_unserved(family) for family in UNSERVED])
    words = "\n\n".join(map(paragraph, (FULL_KV, WINDOWS_ON_A_CPU, NOT_ON_A_CPU)))
    return f"## Families\n\n{table(head, rows)}\n\n{words}\n\n{away}"


def images() -> str:
    return f"## Images\n\n{paragraph(IMAGES)}"


def refused() -> str:
    head = ("class of SGLang", "what it is for")
    rows = sorted((f"`{name}`", words) for name, words in WORDS.items())
    guessed = f"## Guessed tokens\n\n{paragraph(SPECULATION)}"
    return f"## Refused\n\n{paragraph(BY_NAME)}\n\n{table(head, rows)}\n\n{paragraph(SPARSE)}\n\n{guessed}"


def _unserved(family: Unserved) -> tuple[str, str, str, str]:
    return family.serves, family.layout, "on no device" if family.everywhere else "on CPUs", family.why


def _back_end(family: Family) -> str:
    return "Triton's, in torch" if family in TRITON_ONLY else "torch"


def _equal_to(family: Family) -> str:
    return "Hugging Face" if family.like_hugging_face else "SGLang by itself"


def _tested(family: Family) -> str:
    if family.layout == PLAIN:
        return "first answer, from the image on another device beside another model, under pressure"
    tested = "first answer, from the image on another device beside another model, under pressure"
    if family.name in REPRESENTS.values():
        tested += ", by a worker that keeps it built, cached prefixes, resumption after a kill, retraction"
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
