"""Create three tiny demo models with random weights: they answer with noise, but through every part a real model uses.

    python scripts/make_demo_models.py DIR [--only NAME ...]

Three decoder-only families with different depth, KV heads and vocabulary, float32, each with a byte-level BPE tokenizer
trained here and a chat template. The same seed gives the same bytes. Existing models are left as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

BOS, EOS, USER, ASSISTANT, SYSTEM = "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = [BOS, EOS, USER, ASSISTANT, SYSTEM]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + ('user' if message['role'] not in ['assistant', 'system'] else message['role']) + '|>' }}"
    "{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education the be to of and a in that have I it for not on with he as you do at this but his
by from they we say her she or an will my one all would there their what so up out if about who get which go me when
make can like no just him know take into good some could them see other than then now look only come over think also
use two how our first well even new want because any these give most queue memory device token model request page
engine schedule latency answer weight layer head cache prefix stream batch decode prompt server client cluster node
store block copy load serve wait running slowly quickly under between against during without before after around
among data value key map list function class return import string integer float boolean array object null true false
error warning message
""".split()  # noqa: SIM905

SYLLABLES = """
ba be bi bo ca ce co da de di fa fo ga go ka ki la le lo ma mi mo na ne no pa po ra re ro sa se ta te ti
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Demo:
    """One demo model. ``config`` is a function of the vocabulary size, since it imports transformers."""

    name: str
    vocab: int
    seed: int
    config: Callable[[int], Any]


def _common(vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
        "dtype": "float32",
        "initializer_range": 0.1,
    }


def _llama(vocab: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        **_common(vocab),
    )


def _qwen3(vocab: int) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=4096,
        **_common(vocab),
    )


def _stablelm(vocab: int) -> Any:
    from transformers import StableLmConfig

    return StableLmConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        **_common(vocab),
    )


DEMOS = (
    Demo("demo-llama", 2048, 3, _llama),
    Demo("demo-qwen3", 1536, 2, _qwen3),
    Demo("demo-stablelm", 1024, 1, _stablelm),
)


def corpus(seed: int) -> list[str]:
    """Sentences for the tokenizer: the same for the same seed."""
    rng = random.Random(seed)
    made_up = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3))) for _ in range(600)]
    vocabulary = WORDS * 2 + made_up
    lines = []
    for _ in range(6000):
        words = [rng.choice(vocabulary) for _ in range(rng.randint(4, 14))]
        lines.append(" ".join(words).capitalize() + rng.choice([".", ".", ".", "?", "!", ": ", ", "]))
    lines += [json.dumps({rng.choice(WORDS): rng.randint(0, 999), rng.choice(WORDS): None}) for _ in range(800)]
    return lines


def make_tokenizer(folder: Path, vocab: int, seed: int) -> None:
    """Train a byte-level BPE tokenizer of exactly ``vocab`` entries and save it with its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=SPECIALS, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise SystemExit(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {vocab}")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def make(demo: Demo, folder: Path) -> None:
    """Write ``demo`` into ``folder``, which appears only when it is complete."""
    import torch
    from transformers import AutoModelForCausalLM

    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    torch.manual_seed(demo.seed)
    model = AutoModelForCausalLM.from_config(demo.config(demo.vocab))
    model.generation_config.do_sample = False
    model.save_pretrained(partial)
    make_tokenizer(partial, demo.vocab, demo.seed)
    (partial / "README.md").write_text(
        f"# {demo.name}\n\nA demo model of Prism with random weights, seed {demo.seed}. What it writes means nothing.\n"
    )
    partial.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Create tiny demo models with random weights.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--only", nargs="+", choices=[d.name for d in DEMOS], default=[d.name for d in DEMOS])
    options = parser.parse_args()
    for demo in DEMOS:
        folder = options.directory / demo.name
        if demo.name not in options.only:
            continue
        if (folder / "config.json").exists():
            print(f"{folder}: already there")
            continue
        start_s = time.perf_counter()
        make(demo, folder)
        print(f"{folder}: random weights, {demo.vocab} tokens, {time.perf_counter() - start_s:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
