"""Results answer questions: each says machine, commit and command it came from; history stands elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
INDEX = DOCS / "results" / "README.md"
RESULTS = sorted(set((DOCS / "results").glob("*.md")) - {INDEX})
_COMMIT = re.compile(r"[Cc]ommits? [0-9a-f]{7}\b")


def sections(document: Path) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the sections by title."""
    preface, *parts = re.split(r"^## ", document.read_text(), flags=re.MULTILINE)
    return preface, {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in parts}


@pytest.mark.parametrize("document", RESULTS, ids=lambda d: d.name)
def test_the_machine_is_named_once(document: Path) -> None:
    preface, parts = sections(document)
    assert "Machine of every result" in preface
    assert not [title for title, text in parts.items() if "Machine of" in text]


@pytest.mark.parametrize("document", RESULTS, ids=lambda d: d.name)
def test_every_question_names_its_command_and_commit(document: Path) -> None:
    preface, parts = sections(document)
    questions = {title: text for title, text in parts.items() if "?" in title}
    assert questions
    assert not [title for title, text in questions.items() if not _COMMIT.search(preface + text)]
    assert not [title for title, text in questions.items() if "`" not in text.partition("\n|")[0]]


def test_the_overview_leads_to_every_document_and_says_where_every_aim_stands() -> None:
    text = INDEX.read_text()
    assert {document.name for document in RESULTS} <= set(re.findall(r"\]\(([\w-]+\.md)", text))
    aims = [part for title, part in sections(INDEX)[1].items() if part.lstrip().startswith("| aim | reached |")]
    assert len(aims) == len(sections(INDEX)[1]) - 1  # all but the list of documents
    lines = [line for part in aims for line in part.splitlines()[3:] if line.startswith("|")]
    assert not [line for line in lines if "](" not in line and "the same |" not in line]


def test_the_index_of_experiments_names_every_file() -> None:
    index = (DOCS / "experiments" / "README.md").read_text()
    files = {file.name for file in (DOCS / "experiments").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"^\| \[([\w.]+)\]\(\1\)", index, re.MULTILINE)) == files
