"""The decisions that stand stay few enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

DECISIONS = (Path(__file__).resolve().parents[2] / "docs" / "decisions.md").read_text()


def test_they_are_read_in_one_sitting() -> None:
    lines = DECISIONS.splitlines()
    assert len(lines) <= 150, "shorten a paragraph, or move what was tried to docs/experiments"
    assert max(map(len, lines)) <= 180


def test_every_paragraph_names_its_choice() -> None:
    paragraphs = re.split(r"^- ", DECISIONS, flags=re.MULTILINE)[1:]
    assert [p for p in paragraphs if not p.startswith("**")] == []


def test_what_was_dropped_stands_elsewhere() -> None:
    assert not re.search(r"\*\*Not kept", DECISIONS)
