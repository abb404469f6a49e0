"""What single tokens are as bytes, and where they stand in the text. (The text of a token that is a part of a character
says neither.)"""

from __future__ import annotations

import re
from typing import Any, Final

from transformers.convert_slow_tokenizer import bytes_to_unicode

REPLACEMENT: Final = "\ufffd"
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LETTER_BYTES: Final[dict[str, int]] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""How byte-level vocabularies write each byte."""


class TokenLogprob(tuple[float | None, int, str | None]):
    """SGLang's ``(logprob, token id, text)``, which its code takes apart, with what OpenAI's objects want besides."""

    data: bytes
    """The token's bytes."""
    offset: int
    """Characters of the choice's text before the token; -1: not placed (an alternative that was not chosen)."""

    def __new__(cls, logprob: float | None, token_id: int, text: str | None, data: bytes) -> TokenLogprob:
        made = super().__new__(cls, (logprob, token_id, text))
        made.data, made.offset = data, -1
        return made

    @property
    def label(self) -> str:
        """Its text; ``bytes:\\\\xe2\\\\x82``, as OpenAI writes it, where its bytes are no text."""
        text = self[2] or ""
        if REPLACEMENT not in text or self.data == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


def token_bytes(tokenizer: Any, token_id: int, text: str) -> bytes:
    """The bytes of a token whose text is ``text``, from its name in the vocabulary where the text has lost them."""
    if REPLACEMENT not in text:
        return text.encode()
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if isinstance(piece, bytes):
        return piece
    if not isinstance(piece, str):
        return text.encode()
    if found := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(found.group(1), 16)])
    values = [_LETTER_BYTES.get(letter) for letter in piece]
    return text.encode() if None in values else bytes(value for value in values if value is not None)


class Offsets:
    """Where each token of a text begins, in characters, as the tokens come. A token that only goes on with a character
    stands where that character begins."""

    def __init__(self, tokenizer: Any, before: list[int], skip_special: bool, spaces_between: bool) -> None:
        """``before``: the end of what precedes the text (it decides about leading spaces)."""
        self._tokenizer, self._ids = tokenizer, list(before)
        self._options = {"skip_special_tokens": skip_special, "spaces_between_special_tokens": spaces_between}
        self._start, self._read = 0, len(before)
        self.chars = 0
        """Length of the text so far."""
        self.placed = 0
        """Tokens taken."""

    def place(self, token_id: int) -> int:
        """Takes the next token; returns its offset."""
        self._ids.append(token_id)
        self.placed += 1
        offset = self.chars
        known = self._decode(self._ids[self._start : self._read])
        text = self._decode(self._ids[self._start :])
        if len(text) >= len(known) and not text.endswith(REPLACEMENT):
            self.chars += len(text) - len(known)
            self._start, self._read = self._read, len(self._ids)
        return offset

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, **self._options))
