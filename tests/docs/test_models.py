"""The document on models is what the tests test."""

from __future__ import annotations

from tests.docs.model_table import DOCUMENT, render


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == render(), "run `python -m tests.docs.model_table`"
