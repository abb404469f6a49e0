"""One name, one class: whoever searches for a class finds it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

SAME_NAME: dict[str, str] = {}
"""Classes that share a name, and why they may."""


def class_files() -> dict[str, list[str]]:
    """The files of every class of the product, by its name; classes inside functions and classes are left out."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in ("prism", "sglang_patches"):
        for file in sorted((REPO / package).rglob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(file.relative_to(REPO)))
    return found


def test_class_names_are_unique() -> None:
    twice = {name: files for name, files in class_files().items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SAME_NAME} == {}
    assert sorted(set(SAME_NAME) - set(twice)) == [], "no longer shared: take them off the list"
