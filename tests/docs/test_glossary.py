"""The glossary stays in order, and names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| \*\*(.+?)\*\* \| (.+?) \| `([^`]+)` \|$", (REPO / "docs" / "glossary.md").read_text(), re.MULTILINE
)


def test_every_row_is_read() -> None:
    lines = [line for line in (REPO / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| **")]
    assert len(ROWS) == len(lines) > 60


def test_words_stand_in_alphabetical_order() -> None:
    words = [word.lower() for word, _, _ in ROWS]
    assert words == sorted(words)
    assert len(words) == len(set(words))


def test_every_word_lives_in_a_file() -> None:
    assert [(word, file) for word, _, file in ROWS if not (REPO / file).is_file()] == []
