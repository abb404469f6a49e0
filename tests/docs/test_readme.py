"""What the README shows works: its catalog is valid, its commands exist, its Python is Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prism.cli.main import VERBS
from prism.config.load import load_text

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_the_catalog_is_valid(text: str) -> None:
    document = load_text(text.encode(), "README.md", {"TEAM_A_KEY": "sk-12345678"})
    assert len(document.models) == 2


def test_every_command_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    for text in blocks("console"):
        assert set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)) <= targets
        assert set(re.findall(r"prism ([a-z]+)", text)) <= set(VERBS)


@pytest.mark.parametrize("text", blocks("python"))
def test_the_client_example_compiles(text: str) -> None:
    compile(text, "README.md", "exec")
