"""Documents name files; a file that was moved must not leave a document behind."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import make_diagrams

REPO = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "ARCHITECTURE.md", *sorted((REPO / "docs").glob("*.md"))]
_CODE = re.compile(r"`((?:prism|sglang_patches|csrc|scripts|benchmarks|tests|examples|docs|traces)/[\w./-]*)`")
RESULTS = sorted((REPO / "docs" / "results").glob("*.md"))
EXPERIMENTS = sorted((REPO / "docs" / "experiments").glob("*.md"))
_BENCHMARK = re.compile(r"python -m (benchmarks(?:\.\w+)+)|python (benchmarks/[\w/]+\.py)")
_SHORT = re.compile(r"`([\w-]+\.(?:py|cpp|h|md|sh))`")
_WRITTEN = {"results.md"}
"""Files that commands write, not the repository's."""
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
_ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")


def _name(document: Path) -> str:
    return f"{document.parent.name}/{document.name}"


def _sections(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=_name)
def test_every_file_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    missing = [path for path in _CODE.findall(text) if not (REPO / path).exists()]
    missing += [path for path in _LINK.findall(text) if not (document.parent / path).exists()]
    assert not missing


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS], ids=_name)
def test_every_file_a_document_names_without_its_folder_exists(document: Path) -> None:
    folders = ("prism", "sglang_patches", "csrc", "scripts", "benchmarks", "tests", "docs")
    names = {file.name for folder in folders for file in (REPO / folder).rglob("*.*")}
    names |= {file.name for file in REPO.glob("*.md")}
    assert set(_SHORT.findall(document.read_text())) - _WRITTEN - names == set()


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS, *EXPERIMENTS], ids=_name)
def test_every_section_a_document_points_at_exists(document: Path) -> None:
    missing = [
        f"{path}#{anchor}"
        for path, anchor in _ANCHOR.findall(document.read_text())
        if anchor not in _sections(document.parent / path if path else document)
    ]
    assert not missing


@pytest.mark.parametrize("document", [*DOCUMENTS, *RESULTS, *EXPERIMENTS, REPO / "Makefile"], ids=_name)
def test_every_benchmark_a_document_names_exists(document: Path) -> None:
    text = document.read_text()
    modules = [module for module, _ in _BENCHMARK.findall(text) if module]
    paths = [path for _, path in _BENCHMARK.findall(text) if path]
    paths += [f"{module.replace('.', '/')}.py" for module in modules]
    if document.name == "Makefile":
        listed = re.search(r"for question in (.*?);", text, re.DOTALL)
        assert listed is not None
        paths = [f"benchmarks/{name.replace('.', '/')}.py" for name in listed[1].replace("\\", " ").split()]
    assert [path for path in paths if not (REPO / path).is_file()] == []


@pytest.mark.parametrize("document", [*RESULTS, *EXPERIMENTS], ids=_name)
def test_everything_a_result_links_to_exists(document: Path) -> None:
    assert [path for path in _LINK.findall(document.read_text()) if not (document.parent / path).exists()] == []


def test_diagrams_are_what_their_script_draws() -> None:
    stale = [
        name
        for name, draw in make_diagrams.DIAGRAMS.items()
        if (REPO / "docs" / "img" / f"{name}.svg").read_text() != draw()
    ]
    assert not stale, "run scripts/make_diagrams.py"
