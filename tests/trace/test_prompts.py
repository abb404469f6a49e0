"""Prompts have the length that was asked for, and share prefixes exactly where hashes say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from prism.core.errors import InvalidValue
from prism.trace.replay.plan import PromptSource
from prism.trace.replay.prompts import PromptMaker
from prism.trace.replay.words import COMMON_WORDS, load_tokenizer, single_token_words, special_tokens
from tests.trace.helpers import row


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE that adds a start token, as Llama's does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [" ".join(COMMON_WORDS[i::7]) for i in range(7)] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=900, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tok") / "tokenizer.json"
    made.save(str(path))
    return path


def maker(tokenizer: Path, fixed: float = 1.0, block_tokens: int = 16) -> PromptMaker:
    return PromptMaker(PromptSource(tokenizer=str(tokenizer), fixed=fixed), block_tokens, seed=0)


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(2, 3000), index=st.integers(0, 10**7))
def test_a_tokenizer_counts_what_was_asked(tokenizer: Path, tokens: int, index: int) -> None:
    text = maker(tokenizer).prompt(row(0.0, prompt=tokens), index).decode()
    assert len(load_tokenizer(tokenizer).encode(text).ids) == tokens


def test_special_tokens_are_counted(tokenizer: Path) -> None:
    loaded = load_tokenizer(tokenizer)
    assert special_tokens(loaded, single_token_words(loaded, "here")) == 1


def test_prompts_without_hashes_share_no_prefix(tokenizer: Path) -> None:
    made = maker(tokenizer)
    heads = {made.prompt(row(0.0, prompt=40), index).split(b" ")[1:4].__repr__() for index in range(5000)}
    assert len(heads) > 4990


def test_equal_hashes_are_equal_text(tokenizer: Path) -> None:
    made = maker(tokenizer)
    one = made.prompt(row(0.0, prompt=60, prefix_hashes=(5, 6, 7)), 1).split()
    two = made.prompt(row(0.0, prompt=60, prefix_hashes=(5, 6, 9)), 2).split()
    assert one[:32] == two[:32]
    assert one[32:48] != two[32:48]
    assert len(one) == len(two) == 59


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=8, unique=True), st.integers(1, 200))
def test_hashes_decide_the_text_wherever_they_stand(tokenizer: Path, hashes: list[int], prompt: int) -> None:
    made = maker(tokenizer, fixed=0.0)
    words = made.prompt(row(0.0, prompt=prompt, prefix_hashes=tuple(hashes)), 3).split()
    assert len(words) == prompt
    alone = made.prompt(row(0.0, prompt=16, prefix_hashes=(hashes[0],)), 99).split()
    assert words[:16] == alone[: len(words[:16])]


def test_calibrated_text_without_tokenizer() -> None:
    made = PromptMaker(PromptSource(fixed=5.0, per_word=1.25), 512, seed=0)
    assert made.words_for(105) == 80
    assert len(made.prompt(row(0.0, prompt=105), 0).split()) == 80
    assert made.prompt(row(0.0, prompt=1), 0).split()


def test_unusable_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="neither"):
        load_tokenizer(tmp_path)
    tiny = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    with pytest.raises(InvalidValue, match="has only 0 whole words"):
        single_token_words(tiny, "tiny")
