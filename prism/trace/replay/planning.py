"""From what a user says to a plan: which models, objectives and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from prism.core.errors import InvalidValue
from prism.trace.convert import sha256_of
from prism.trace.files import open_trace
from prism.trace.replay.plan import Objective, PromptSource, SendPlan
from prism.trace.replay.probe import Prober
from prism.trace.steps import Step, apply_steps, count_models, info_after
from prism.trace.transform import fold


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What is to be sent where; see ``prism replay --help``."""

    trace: Path
    url: str
    endpoint: str = "completions"
    steps: Sequence[Step] = ()
    onto: Sequence[str] = ()
    """Served models to fold the trace's models onto; empty: the trace's names."""
    fold: str = "rank"
    objectives: Mapping[str, Objective] = field(default_factory=dict)
    default_objective: Objective = field(default_factory=Objective)
    slo_scale: float = 1.0
    tokenizers: Mapping[str, Path] = field(default_factory=dict)
    """By served model."""
    probe: bool | None = None
    """Ask the server how it counts tokens; None: only for models without a tokenizer."""
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    timeout_s: float = 600.0
    limit: int | None = None
    api_key: str | None = None


def make_plan(options: ReplayOptions) -> SendPlan:
    """The plan. Reads the trace once, asks the server where prompts must be calibrated. Raises :class:`InvalidValue`
    (a model without name, an unknown model in the objectives) or :class:`~prism.trace.replay.probe.ProbeFailed`."""
    trace = open_trace(options.trace)
    steps = [*options.steps]
    counts = count_models(apply_steps(trace.rows(), steps))
    if options.onto:
        names = fold(counts, options.onto, options.fold)
        steps.append({"step": "models", "names": names})
        counts = count_models(apply_steps(trace.rows(), steps))
    if "" in counts:
        raise InvalidValue("model", "", "the trace names no models: say onto which to replay it (--onto)")
    if not counts:
        raise InvalidValue("trace", str(options.trace), "holds no request after the transforms")
    objectives = {
        name: options.objectives.get(name, Objective()).or_else(options.default_objective).scaled(options.slo_scale)
        for name in sorted(counts)
    }
    return SendPlan(
        trace=str(options.trace.resolve()),
        trace_sha256=sha256_of(options.trace),
        steps=steps,
        block_tokens=info_after(trace.info, steps).block_tokens,
        url=options.url,
        endpoint=options.endpoint,
        models={name: name for name in sorted(counts)},
        prompts={name: _prompts(name, options) for name in sorted(counts)},
        objectives=objectives,
        ignore_eos=options.ignore_eos,
        extra=dict(options.extra),
        seed=options.seed,
        timeout_s=options.timeout_s,
        limit=options.limit,
    )


def count_requests(plan: SendPlan) -> int:
    """How many requests the plan sends. Reads the trace once."""
    rows = apply_steps(open_trace(plan.trace).rows(), plan.steps)
    return sum(1 for _ in islice(rows, plan.limit))


def first_arrivals(plan: SendPlan) -> dict[str, float]:
    """When the first request of each model is due. Reads the trace up to the last of them."""
    found: dict[str, float] = {}
    for row in apply_steps(open_trace(plan.trace).rows(), plan.steps):
        found.setdefault(row.model, row.arrival_s)
        if len(found) == len(plan.models):
            break
    return found


def only_model(plan: SendPlan, model: str, limit: int | None, start_s: float = 0.0) -> SendPlan:
    """The same plan with the requests of one model alone, with their own gaps, from ``start_s`` of the trace on."""
    window = [{"step": "window", "start_s": start_s}] if start_s > 0 else []
    return msgspec.structs.replace(
        plan,
        steps=[*plan.steps, {"step": "only", "models": [model]}, *window],
        models={model: plan.models[model]},
        prompts={model: plan.prompts[model]},
        objectives={model: Objective()},
        limit=limit,
    )


def _prompts(model: str, options: ReplayOptions) -> PromptSource:
    """A tokenizer fixes the words; the server fixes what it adds to them."""
    from prism.trace.replay.words import load_tokenizer, single_token_words, special_tokens

    path = options.tokenizers.get(model)
    source = PromptSource()
    if path is not None:
        tokenizer = load_tokenizer(path)
        words = single_token_words(tokenizer, str(path))
        file = path / "tokenizer.json" if path.is_dir() else path
        source = PromptSource(tokenizer=str(file.resolve()), fixed=special_tokens(tokenizer, words))
    probe = options.probe if options.probe is not None else (path is None or options.endpoint == "chat")
    if not probe:
        return source
    prober = Prober(options.url, options.endpoint, options.api_key, options.ignore_eos, options.timeout_s)
    return prober.calibrate(model, source)
