"""Words that are one token each, so that a text of n words is a prompt of n tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from prism.core.errors import InvalidValue

MOST_WORDS: Final = 2048
FEWEST_WORDS: Final = 32

_COMMON: Final = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new
sound take only little work know place year live me back give most very after thing our just name good man think
say great where help through much before line right too mean old any same tell boy follow came want show also
around form three small set put end does another well large must big even such because turn here why ask went
men read need land different home us move try kind hand picture again change off play spell air away animal
house point page letter mother answer found study still learn should world
"""
COMMON_WORDS: Final = tuple(_COMMON.split())
"""Frequent English words: one token each, with a space ahead, in the vocabularies of common models."""


def single_token_words(tokenizer: Tokenizer, where: str) -> list[str]:
    """Words of ASCII letters that ``tokenizer`` makes one token of, with a space ahead, alone and side by side. Raises
    :class:`InvalidValue` (naming ``where``) when it has too few of them to write varied text."""
    found: list[str] = []
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: int(item[1])):
        word = token[1:]
        if token[:1] not in ("Ġ", "▁", " ") or not (2 <= len(word) <= 12 and word.isascii() and word.isalpha()):
            continue
        if _ids(tokenizer, f" {word}")[-1:] == [index] and len(_ids(tokenizer, f" {word} {word}")) == 2:
            found.append(word)
            if len(found) == MOST_WORDS:
                break
    if len(found) < FEWEST_WORDS:
        raise InvalidValue("tokenizer", where, f"has only {len(found)} whole words ({FEWEST_WORDS} needed)")
    return found


def special_tokens(tokenizer: Tokenizer, words: list[str]) -> int:
    """How many tokens (start of text and the like) the tokenizer adds to a plain text."""
    text = " " + " ".join(words[:8])
    return len(tokenizer.encode(text).ids) - len(_ids(tokenizer, text))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in ``path``, a ``tokenizer.json`` or a folder with one. Raises :class:`InvalidValue`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidValue("tokenizer", str(path), "is neither a tokenizer.json nor a folder with one")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as exc:  # the library raises nothing narrower
        raise InvalidValue("tokenizer", str(file), f"cannot be read: {exc}") from exc


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
