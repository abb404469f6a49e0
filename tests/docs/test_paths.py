"""Documents name files; a file that was moved must not leave a document behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "ARCHITECTURE.md", *sorted((REPO / "docs").glob("*.md"))]
_CODE = re.compile(r"`((?:prism|sglang_patches|csrc|scripts|benchmarks|tests|examples|docs|traces)/[\w./-]*)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_every_file_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    missing = [path for path in _CODE.findall(text) if not (REPO / path).exists()]
    missing += [path for path in _LINK.findall(text) if not (document.parent / path).exists()]
    assert not missing
