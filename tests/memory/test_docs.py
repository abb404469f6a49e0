"""The example of docs/memory.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "memory.md"


def test_the_documented_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(example, str(DOCUMENT), "exec"), {})
