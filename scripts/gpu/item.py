"""Runs one item in a process of its own: a hang, a crash or an illegal access ends the item, not the stage.

python -m scripts.gpu.item STAGE ITEM --partial FILE --scratch DIR [--dry-run]
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from prism.engine.process import die_with_parent
from scripts.gpu.run import Run, Skip
from scripts.gpu.stage import Stage


def stage_of(module: str) -> Stage:
    """The stage a module defines (``scripts.gpu.stage1_memory``)."""
    found = importlib.import_module(module).STAGE
    assert isinstance(found, Stage), f"{module}.STAGE is a {type(found).__name__}"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage")
    parser.add_argument("item")
    parser.add_argument("--partial", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--parent-pid", type=int, default=os.getppid())
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    die_with_parent(options.parent_pid)
    run = Run(options.item, options.partial, options.scratch, dry=options.dry_run)
    try:
        stage_of(options.stage).item(options.item).action(run)
    except Skip as reason:
        run.end(skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        run.end(fault=f"{type(error).__name__}: {error}".splitlines()[0][:500])
    else:
        run.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
