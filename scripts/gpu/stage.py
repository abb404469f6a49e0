"""A stage: items that run one after the other, each in its own process with its own limit.

A stage that was killed goes on where it stopped: give the same ``--out``. One that ran out of its minutes says which
items are left; run it again for them.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from prism.memory.gpus import ORDER, NoDriver, read_gpus
from scripts.gpu.journal import Journal
from scripts.gpu.run import Run
from scripts.gpu.verdicts import Finding, Verdict

ROOT: Final = Path(__file__).resolve().parents[2]
DRY_PATIENCE: Final = 4.0
"""Limits are for a machine with a GPU; dry runs may be on a busy one with two cores."""
LEAST_S: Final = 5.0
"""With less than this left of its minutes a stage starts no other item."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question. ``limit_s`` after which its processes are ended."""

    name: str
    action: Callable[[Run], None]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """``about`` is the question it asks, ``module`` where it is defined; the module's last part names the stage and its
    file of results."""

    module: str
    about: str
    items: tuple[Item, ...]

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]

    def item(self, name: str) -> Item:
        """Raises ``KeyError`` with the choices."""
        for item in self.items:
            if item.name == name:
                return item
        raise KeyError(f"{self.name} has no item {name}; it has {', '.join(i.name for i in self.items)}")


def machine_facts() -> dict[str, str]:
    """The machine that results belong to."""
    facts = {"python": platform.python_version(), "cpus": str(os.cpu_count()), "kernel": platform.release()}
    try:
        found = read_gpus()
    except NoDriver as reason:
        return {**facts, "gpu": f"none: {reason}"}
    facts["cuda"] = "{}.{}".format(*found.cuda_version)
    for gpu in found.gpus:
        facts[f"cuda:{gpu.index}"] = (
            f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB, {gpu.used_bytes / 2**30:.2f} used"
        )
    return facts


def options_of(stage: Stage, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {stage.module}", description=stage.about)
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else None, required=not out, metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, as far as that goes")
    parser.add_argument("--only", nargs="+", metavar="ITEM", choices=[i.name for i in stage.items])
    parser.add_argument("--again", nargs="*", metavar="ITEM", help="forget these results (all, if none is named)")
    parser.add_argument("--minutes", type=float, default=8.0, help="start no item after so long (default 8)")
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/prism-gpu-kit"), metavar="DIR")
    return parser.parse_args(argv)


def run_stage(stage: Stage, argv: Sequence[str] | None = None) -> int:
    """The command of a stage; 0 when nothing is wrong and nothing is left to do."""
    options = options_of(stage, argv)
    deadline_s = time.monotonic() + 60 * options.minutes
    journal = Journal(options.out / f"{stage.name}.json", stage.name, machine_facts(), dry=options.dry_run)
    if options.again is not None:
        journal.forget(options.again or [item.name for item in stage.items])
    options.scratch.mkdir(parents=True, exist_ok=True)
    chosen = [item for item in stage.items if not options.only or item.name in options.only]
    left = []
    for item in chosen:
        if not journal.has(item.name):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s < LEAST_S:
                left.append(item.name)
                continue
            limit_s = min(item.limit_s * (DRY_PATIENCE if options.dry_run else 1.0), remaining_s)
            journal.add(run_item(stage, item, options.scratch, limit_s, dry=options.dry_run))
        print(journal.results.items[item.name].finding.line(), flush=True)
    if left:
        print(f"left     out of minutes; run it again with the same --out for {', '.join(left)}", flush=True)
    wrong = any(journal.results.items[i.name].finding.verdict is Verdict.WRONG for i in chosen if journal.has(i.name))
    return 1 if wrong or left else 0


def run_item(stage: Stage, item: Item, scratch: Path, limit_s: float, *, dry: bool) -> Finding:
    """Run ``item`` in a process group of its own and end what is left of it."""
    with tempfile.TemporaryDirectory(prefix="prism-gpu-") as folder:
        partial, log = Path(folder) / "finding.json", Path(folder) / "log"
        command = [sys.executable, "-m", "scripts.gpu.item", stage.module, item.name, "--parent-pid", str(os.getpid())]
        command += ["--partial", str(partial), "--scratch", str(scratch), *(["--dry-run"] if dry else [])]
        start_s = time.perf_counter()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=sink, stderr=sink, start_new_session=True, env={**os.environ, **ORDER}
            )
            try:
                ending = _await(process, limit_s)
            finally:
                _end_group(process)
        finding = _read(partial, item.name)
        finding.seconds = time.perf_counter() - start_s
        if not finding.is_over:
            finding.faults.append(f"{ending}; last words: {_last_words(log)}")
        elif finding.verdict is Verdict.WRONG:
            finding.remarks.append(f"last words: {_last_words(log)}")
        return finding


def _await(process: subprocess.Popen[bytes], limit_s: float) -> str:
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"ended after its limit of {limit_s:.0f} s"
    return f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _read(partial: Path, item: str) -> Finding:
    if not partial.exists():
        return Finding(item=item)
    return msgspec.json.decode(partial.read_bytes(), type=Finding)


def _last_words(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return " | ".join(lines[-4:])[-600:] or "none"
