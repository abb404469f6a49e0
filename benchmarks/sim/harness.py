"""Options and loop that the long comparisons share: draws of a split, pieces in a folder, an end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from benchmarks.sim.pieces import Pieces, Work
from benchmarks.sim.splits import Split, draws


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that all of them have."""
    found = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    found.add_argument("--work", type=Path, required=True, help="folder of the pieces; what is there is not run again")
    found.add_argument("--set", choices=[s.value for s in Split], default=Split.JUDGING.value, help="of draws")
    found.add_argument("--draws", type=int, default=3, help="so many of the set")
    found.add_argument("--first", type=int, default=0, help="draws from this one on only")
    found.add_argument("--until", default="", help="HH:MM; no piece is begun later")
    found.add_argument("--write", action="store_true", help="make the files of docs/results of what is done")
    return found


def chosen_draws(args: argparse.Namespace) -> tuple[int, ...]:
    return draws(Split(args.set), args.draws, args.first)


def make(args: argparse.Namespace, pieces: Pieces, wanted: Iterable[tuple[str, Work]]) -> None:
    """Make what is wanted and not there yet, as long as there is time; several processes may do it together."""
    for name, seconds in pieces.do(wanted, _until_s(args.until)):
        print(f"{seconds:7.1f} s  {name}", flush=True)


def _until_s(clock: str) -> float:
    if not clock:
        return float("inf")
    hour, minute = map(int, clock.split(":"))
    return datetime.fromtimestamp(time.time()).replace(hour=hour, minute=minute, second=0).timestamp()
