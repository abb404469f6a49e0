"""Which models' layers can run in other engines, as far as their specs tell (pure). What else an engine finds only it
knows (:class:`prism.remote.orders.OrderDone`)."""

from __future__ import annotations

from prism.core.specs import ModelKind, ModelSpec


def whole_only(spec: ModelSpec) -> str:
    """Why instances of the model serve with all their weights only; empty: they may serve earlier."""
    if spec.shape.layers < 2:
        return "one layer"
    if spec.kind is not ModelKind.GENERATE:
        return f"it answers with {_ANSWERS[spec.kind]}"
    if spec.lora is not None:
        return "adapters"
    if spec.speculation is not None:
        return "speculative decoding"
    return ""


_ANSWERS = {ModelKind.EMBED: "vectors", ModelKind.CLASSIFY: "labels", ModelKind.RERANK: "scores"}
