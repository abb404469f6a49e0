"""From a measured run to a calibration table.

The run is made for it (:func:`plan_run`), in three phases that are far enough apart that nothing overlaps:

- *alone*: requests of one model at a time, singly or in bursts of equal ones. A lone request gives a TTFT sample
  and a decode sample (its TPOT); a burst of ``b`` equal ones gives a decode sample of batch ``b``, and its last first
  token says what requests take when they enter. What short prompts take beyond a step is the way through the rest of
  the system, which the fit of the table tells apart.
- *together*: an answer of each model while one, then two others give longer ones. How much slower its tokens come than
  alone tells what part of the cores one engine takes, and what the rest of the system takes beside them
  (:func:`fit_sharing`).
- *waking*: single requests for models that have left in the meantime (their keep-alive is shorter than the pause).
  Their TTFT beyond that of the same request to a loaded model is the time of an activation in an engine that keeps what
  it built for the model (:func:`activation_s`). The first request of each model is to one that nobody has built yet
  (:func:`building_s`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from prism.sim.calibration import CalibrationFile, StepSample
from prism.trace.report import RequestRecord
from prism.trace.row import TraceRow

PROMPTS: Final = (16, 64, 128, 256, 512)
BATCHES: Final = (1, 2, 4, 8)
BATCH_PROMPT: Final = 64
OUTPUT: Final = 48
REPEATS: Final = 3
TOGETHER_OUTPUT: Final = 96
LONE_OUTPUT: Final = 24
LONE_OUTPUTS: Final = (LONE_OUTPUT, TOGETHER_OUTPUT)
"""Of a request that is alone. Answers of two lengths tell a token's time from what an answer takes once; the long ones
are what the answers of the next phase are compared with."""
BESIDE_OUTPUT: Final = 3 * TOGETHER_OUTPUT
"""Of the others, so that they still run when it ends: the slowest model's tokens take less than three times the
fastest's."""
PAIR_REPEATS: Final = 2
"""Two engines at once are what is common, and one answer's time is uncertain by a tenth."""
WAKES: Final = 3


@dataclass(frozen=True)
class CalibrationPlan:
    """The trace of a calibration run, with the rows (by index) of its phases."""

    rows: tuple[TraceRow, ...]
    alone: range
    together: range
    waking: range


def plan_run(
    models: Sequence[str],
    pause_s: float = 1.0,
    keep_alive_s: float = 4.0,
    earlier: bool = False,
) -> CalibrationPlan:
    """The run for ``models``, which must fit into memory together and leave after ``keep_alive_s`` without requests.
    ``pause_s`` must be longer than any short request takes, and less than a third of ``keep_alive_s``. ``earlier``: as
    it was first made, with short lone answers only and every pair once; all can be read from such a run, too, less
    exactly."""
    rows = list(calibration_rows(models, pause_s, lone_outputs=LONE_OUTPUTS[:1] if earlier else LONE_OUTPUTS))
    alone = len(rows)
    at_s = rows[-1].arrival_s + 2 * pause_s
    begun = len(rows)
    for count in range(2, len(models) + 1):
        for first in [*range(len(models))] * (1 if earlier or count > 2 else PAIR_REPEATS):
            # whoever has left comes back before: an activation beside the answers would be measured with them
            rows += [TraceRow(at_s, model, BATCH_PROMPT, LONE_OUTPUT) for model in models]
            group = [models[(first + place) % len(models)] for place in range(count)]
            outputs = [TOGETHER_OUTPUT, *[BESIDE_OUTPUT] * (count - 1)]
            at_s += 1.5 * pause_s
            rows += [TraceRow(at_s, *row) for row in zip(group, [BATCH_PROMPT] * count, outputs, strict=True)]
            at_s += 2.5 * pause_s
    together = len(rows)
    for _ in range(WAKES):
        at_s += keep_alive_s + 2 * pause_s
        for model in models:
            rows.append(TraceRow(at_s, model, BATCH_PROMPT, LONE_OUTPUT))
            at_s += pause_s
    return CalibrationPlan(tuple(rows), range(alone), range(begun, together), range(together, len(rows)))


def calibration_rows(
    models: Sequence[str],
    pause_s: float = 2.0,
    start_s: float = 5.0,
    lone_outputs: Sequence[int] = LONE_OUTPUTS,
) -> Iterator[TraceRow]:
    """The trace of a calibration run. ``pause_s`` must be longer than any request takes; the first request of every
    model only loads it."""
    at_s = start_s
    for model in models:
        yield TraceRow(at_s, model, BATCH_PROMPT, LONE_OUTPUT)
        at_s += 3 * pause_s
        for tokens in PROMPTS * REPEATS:
            for answer in lone_outputs:
                yield TraceRow(at_s, model, tokens, answer)
                at_s += pause_s
        for batch in BATCHES * REPEATS:
            for _ in range(batch):
                yield TraceRow(at_s, model, BATCH_PROMPT, OUTPUT)
            at_s += 2 * pause_s


def samples(records: Iterable[RequestRecord]) -> list[StepSample]:
    """Samples of a calibration run: medians over equal groups. Failed requests and the first of each model are left
    out."""
    groups: dict[tuple[str, float], list[RequestRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda r: r.row):
        groups[(record.model, record.arrival_s)].append(record)
    prefill: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    decode: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    seen: set[str] = set()
    for (model, _), group in groups.items():
        first = model not in seen
        seen.add(model)
        if first or any(r.error for r in group):
            continue
        tpots = [r.tpot_s for r in group if r.tpot_s is not None]
        context = sum(r.prompt_tokens + r.output_tokens // 2 for r in group)
        if tpots:
            decode[(model, len(group), context, group[0].output_tokens)].append(median(tpots))
        ttfts = [r.ttft_s for r in group if r.ttft_s is not None]
        if ttfts:
            prefill[(model, sum(r.prompt_tokens for r in group), len(group))].append(max(ttfts))
    return [
        *(
            StepSample(model=m, kind="ttft", tokens=n, sequences=b, steps=min(2, b), seconds=median(s))
            for (m, n, b), s in prefill.items()
        ),
        *(
            StepSample(model=m, kind="decode", batch=b, context=c, tokens=n, seconds=median(s))
            for (m, b, c, n), s in decode.items()
        ),
    ]


def activation_s(records: Iterable[RequestRecord], plan: CalibrationPlan) -> float:
    """Seconds that bringing a model back took: how much longer than loaded ones the requests of the waking phase waited
    for their first token. Median over models and repeats."""
    return _longer_s(records, plan, plan.waking)


def building_s(records: Iterable[RequestRecord], plan: CalibrationPlan) -> float:
    """The same where no engine had the model before: of the first request of each model."""
    firsts: dict[str, int] = {}
    for number in plan.alone:
        firsts.setdefault(plan.rows[number].model, number)
    return _longer_s(records, plan, set(firsts.values()))


def _longer_s(records: Iterable[RequestRecord], plan: CalibrationPlan, rows: Container[int]) -> float:
    """How much longer than requests to loaded models those of ``rows`` waited for their first token; median."""
    loaded: dict[str, list[float]] = defaultdict(list)
    found: list[tuple[str, float]] = []
    for record in records:
        if record.error or record.ttft_s is None or record.prompt_tokens != BATCH_PROMPT:
            continue
        if record.row in rows:
            found.append((record.model, record.ttft_s))
        elif record.row in plan.alone and record.output_tokens == LONE_OUTPUT:
            loaded[record.model].append(record.ttft_s)
    return max(0.0, median(ttft_s - median(loaded[model]) for model, ttft_s in found))


def slowdowns(records: Iterable[RequestRecord], plan: CalibrationPlan) -> dict[int, float]:
    """How many times longer a token takes while so many engines answer one request each. Median over the answers that
    others outlasted, each beside the model's longest lone answers: what an answer takes once, in its first steps and
    its last, must not pass for the time of a token (with short ones, two engines seemed to share the cores better than
    they do)."""
    groups: dict[float, list[RequestRecord]] = defaultdict(list)
    lone: dict[tuple[str, float], list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.error or record.tpot_s is None:
            continue
        if record.row in plan.together:
            groups[record.arrival_s].append(record)
        elif record.row in plan.alone and record.prompt_tokens == BATCH_PROMPT:
            lone[(record.model, record.arrival_s)].append(record)
    alone = _longest_lone(found[0] for found in lone.values() if len(found) == 1)
    found: dict[int, list[float]] = defaultdict(list)
    for group in groups.values():
        lasted = [r for r in group if r.output_tokens == TOGETHER_OUTPUT]
        found[len(group)] += [r.tpot_s / median(alone[r.model]) for r in lasted if r.tpot_s is not None]
    return {count: median(ratios) for count, ratios in sorted(found.items()) if ratios}


def _longest_lone(records: Iterable[RequestRecord]) -> dict[str, list[float]]:
    """Seconds per token of each model's longest answers among ``records``."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.tpot_s is not None:
            found[record.model][record.output_tokens].append(record.tpot_s)
    return {model: by_length[max(by_length)] for model, by_length in found.items()}


def fit_sharing(slower: Mapping[int, float], cores: int) -> tuple[float, float]:
    """``(engine share, background)`` of a host's compute such that ``n`` engines are slowed down by ``n * share +
    background`` (:mod:`prism.sim.sharing`): least squares, with at least ``1 / cores`` for an engine and one engine
    alone not slowed down. Engines that were slower by less than ``n / cores`` did not run all at the same time: such a
    point says nothing and is left out. What grows faster than the number of engines is not sharing but crowding
    (:func:`fit_crowding`), and counts here as if it grew with it: two at once are what is common."""
    least = 1.0 / cores
    points = [(count, ratio) for count, ratio in sorted(slower.items()) if ratio > max(1.0, count * least)]
    if not points:
        return least, 0.0
    fewest, together = points[0]
    points = [(count, min(ratio, together * count / fewest)) for count, ratio in points]
    options = []
    for step in range(101):
        share = least + (1.0 - least) * step / 100
        background = sum(ratio - count * share for count, ratio in points) / len(points)
        background = min(max(0.0, background), 1.0 - share)
        error = sum((count * share + background - ratio) ** 2 for count, ratio in points)
        options.append((error, share, background))
    return min(options)[1:]


def fit_crowding(slower: Mapping[int, float], cores: int, share: float, background: float) -> float:
    """What each engine beyond ``cores`` costs all of them besides its share (:class:`prism.sim.sharing.Crowd`): what
    was measured with more engines than cores over what :func:`fit_sharing` says, per engine beyond."""
    beyond = [
        (ratio - max(1.0, count * share + background)) / (count - cores)
        for count, ratio in slower.items()
        if count > cores
    ]
    return max(0.0, median(beyond)) if beyond else 0.0


def calibrate(
    records: Iterable[RequestRecord], gpu: str, machine: str, overrides: dict[str, float] | None = None
) -> CalibrationFile:
    """The table of a calibration run."""
    return CalibrationFile(gpu=gpu, machine=machine, samples=samples(records), gpu_overrides=overrides or {})
