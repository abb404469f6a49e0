"""Where recorded traces are looked for. None is in the repository: whoever has converted originals (see
``traces/README.md``) keeps them, under the names that benchmarks and tests give, in one of these folders:

1. those that ``PRISM_TRACES`` names (several with the system's path separator),
2. ``traces/originals/`` of the checkout (ignored by git; may be a link),
3. ``shared/traces/`` beside the checkout, one folder for several checkouts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

VARIABLE: Final = "PRISM_TRACES"
ROOT: Final = Path(__file__).parents[2]


def folders() -> list[Path]:
    """The folders in which originals are looked for, in this order; some may not exist."""
    given = [Path(part) for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*given, ROOT / "traces" / "originals", ROOT.parent / "shared" / "traces"]


def find_original(name: str) -> Path | None:
    """The file called ``name`` in the first folder that has it; None when none has."""
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)
