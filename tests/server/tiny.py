"""A model folder without weights: a byte-level tokenizer (token id = byte), a chat template, a small config."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB = 260
CONTEXT = 512

TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_letters() -> list[str]:
    """The printable letter that byte-level tokenizers write for each byte (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def make_model(folder: Path) -> Path:
    """Writes the folder and returns it."""
    folder.mkdir(parents=True)
    vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    )
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "rms_norm_eps": 1e-5,
            "torch_dtype": "float32",
        },
    )
    _write(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    return folder


def _write(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data))
