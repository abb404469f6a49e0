"""Paragraphs and tables of generated documents."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
