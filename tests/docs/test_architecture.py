"""ARCHITECTURE.md shows the layers that the import rules enforce, and every package has its line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
TEXT = (REPO / "ARCHITECTURE.md").read_text()
LAYERS = TEXT.split("## Layers", 1)[1].split("\n## ", 1)[0]


def test_the_layers_are_those_that_are_checked() -> None:
    rules = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (enforced,) = [rule["layers"] for rule in rules if rule["type"] == "layers"]
    shown = LAYERS.split("(checked by", 1)[0].split("\n\n", 1)[1].replace("`", "")
    names = [[name.strip() for name in re.split(r"[|:]", layer)] for layer in shown.split("->")]
    assert names == [[name.strip().removeprefix("prism.") for name in re.split(r"[|:]", layer)] for layer in enforced]


def test_every_package_has_its_line() -> None:
    packages = {folder.parent.name for folder in (REPO / "prism").glob("*/__init__.py")}
    listed = {
        name.removeprefix("prism/")
        for row in re.findall(r"^\| ([^|]+) \|", LAYERS, re.MULTILINE)
        for name in re.findall(r"`([\w/]+)`", row)
    }
    assert packages <= listed
