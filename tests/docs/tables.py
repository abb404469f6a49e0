"""Paragraphs and tables of generated documents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def paragraph(text: str) -> str:
    """One for each part that an empty line ends."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), 120) for part in text.strip().split("\n\n"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
