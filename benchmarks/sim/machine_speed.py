"""How fast is this machine just now?

A virtual machine's cores are as fast as its neighbours let them be: in one validation a lone token took 2.5 ms for an
hour and 2.0 ms in the next half hour. A model that was calibrated once foretells the machine it was calibrated on. So
the same few answers are timed when it is calibrated and before every live run, and the run can be foretold for the
machine as it is then, too; of the run itself nothing is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import httpx
import msgspec
import yaml

from prism.core.ids import ModelName
from prism.sim.calibration import CalibrationFile
from tests.patience import PATIENCE_S

_ANSWERS, _TOKENS = 5, 48


def token_s(url: str, models: Sequence[ModelName]) -> float:
    """Seconds per token of answers with nothing beside them: mean over ``models`` of the median of a few."""
    return fmean(median(_answer(url, model) for _ in range(_ANSWERS)) for model in models)


def _answer(url: str, model: ModelName) -> float:
    """Seconds per token of one answer."""
    body = {"model": model, "prompt": " the" * 16, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    times: list[float] = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE_S) as answer:
        answer.raise_for_status()
        times.extend(time.perf_counter() for line in answer.iter_lines() if '"text"' in line)
    return (times[-1] - times[0]) / (_TOKENS - 1)


def slowed(cluster: Path, table: Path, factor: float, folder: Path) -> Path:
    """Write the calibrated cluster for a machine on which everything takes ``factor`` times as long; its file."""
    folder.mkdir(parents=True, exist_ok=True)
    made = msgspec.json.decode(table.read_bytes(), type=CalibrationFile)
    samples = [msgspec.structs.replace(sample, seconds=factor * sample.seconds) for sample in made.samples]
    (folder / table.name).write_bytes(msgspec.json.encode(msgspec.structs.replace(made, samples=samples)))
    data = yaml.safe_load(cluster.read_text())
    took = {key: float(value.removesuffix("ms")) for key, value in data["timing"].items()}
    data["timing"] = {key: f"{factor * ms:.2f}ms" for key, ms in took.items()}
    (folder / cluster.name).write_text(yaml.safe_dump(data))
    return folder / cluster.name
