"""What a model answers with (:class:`prism.core.specs.ModelKind`), and whether SGLang makes of a text the vector that
the model was trained for. Read from its files; nothing here imports SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from prism.config.engine_args import registries
from prism.core.specs import ModelKind

READS_BOTH_WAYS: Final = frozenset(
    (
        "BertModel",
        "Contriever",
        "BertForSequenceClassification",
        "XLMRobertaModel",
        "XLMRobertaForSequenceClassification",
    )
)
"""Encoders, in which every token sees those behind it: a text cannot be taken in by chunks, nor a prefix reused."""

_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_MODULES: Final = "modules.json"
"""Where the sentence-transformers library lists what follows the transformer."""
_MAX_FILE_BYTES: Final = 1 << 20


def kind_of(config: Mapping[str, Any], sentence_encoder: bool) -> ModelKind:
    """By the parsed ``config.json``; ``sentence_encoder``: :func:`is_sentence_encoder` of the folder.

    1. A cross-encoder with one label scores pairs, with several it is a classifier.
    2. Other classifiers and reward models.
    3. What SGLang pools, and what comes with a pooling module for its vectors.
    4. All others generate.
    """
    names = architectures(config)
    known = registries()
    if any(name in known.cross_encoders for name in names):  # 1
        return ModelKind.RERANK if labels(config) == 1 else ModelKind.CLASSIFY
    if any("Classification" in name or "RewardModel" in name for name in names):  # 2
        return ModelKind.CLASSIFY
    pooled = any(name in known.pooled for name in names)
    return ModelKind.EMBED if pooled or sentence_encoder else ModelKind.GENERATE  # 3, 4


def architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    """As ``config.json`` names them; none when it says nothing usable."""
    found = config.get("architectures")
    return tuple(map(str, found)) if isinstance(found, list) else ()


TEXT_ONLY_UNASKED: Final = frozenset(
    (
        "Gemma3ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Step3VLForConditionalGeneration",
        "InklingForConditionalGeneration",
    )
)
"""Architectures that take images and of which SGLang serves the text alone unless it is told otherwise."""


def image_arguments(names: Iterable[str], wanted: bool) -> dict[str, Any]:
    """Engine arguments with which a model with these ``architectures`` takes images where they are ``wanted``."""
    return {"enable_multimodal": True} if wanted and not TEXT_ONLY_UNASKED.isdisjoint(names) else {}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal model's configuration; else all of it."""
    return next((config[key] for key in _TEXT_CONFIGS if isinstance(config.get(key), dict)), config)


def labels(config: Mapping[str, Any]) -> int:
    """How many scores a classifier has; the libraries' default is two."""
    named = config.get("id2label")
    if isinstance(named, dict) and named:
        return len(named)
    count = config.get("num_labels")
    return count if isinstance(count, int) else 2


def reads_both_ways(names: Iterable[str]) -> bool:
    """Whether the model with these ``architectures`` is an encoder (:data:`READS_BOTH_WAYS`)."""
    return any(name in READS_BOTH_WAYS for name in names)


def is_sentence_encoder(folder: Path) -> bool:
    """Whether the folder says how the model's tokens become one vector: what generates has no such file."""
    return any(_name(module) == "Pooling" for module in _modules(folder))


def pooling_problem(folder: Path, names: Iterable[str]) -> str | None:
    """Why SGLang would make other vectors than the embedding model in ``folder`` was trained for; None when it makes
    the same (up to their length, which it always makes 1) or nothing is said."""
    modules = _modules(folder)
    beyond = [_name(module) for module in modules if _name(module) not in ("Transformer", "Pooling", "Normalize")]
    if beyond:
        return (
            f"{folder / _MODULES} has a module {beyond[0]!r}, which SGLang does not apply: its vectors would be others"
        )
    ours = "cls_token" if reads_both_ways(names) else "lasttoken"
    for module in (m for m in modules if _name(m) == "Pooling"):
        file = folder / str(module.get("path", "")) / "config.json"
        theirs = _pooling_modes(_read(file))
        if theirs and theirs != [ours]:
            return (
                f"{file} pools by {' and '.join(theirs)}, SGLang takes {ours} of such a model: its vectors would be "
                "others; what would serve it: a model pooled so"
            )
    return None


def _modules(folder: Path) -> list[dict[str, Any]]:
    found = _read(folder / _MODULES)
    return [module for module in found if isinstance(module, dict)] if isinstance(found, list) else []


def _name(module: Mapping[str, Any]) -> str:
    return str(module.get("type", "")).rpartition(".")[2]


def _pooling_modes(config: Any) -> list[str]:
    """``mean_tokens``, ``cls_token``, ``lasttoken``, ...: those that are switched on."""
    if not isinstance(config, dict):
        return []
    if isinstance(mode := config.get("pooling_mode"), str):  # newer releases write one name
        return [{"cls": "cls_token", "mean": "mean_tokens"}.get(mode, mode)]
    prefix = "pooling_mode_"
    return [key.removeprefix(prefix) for key, on in config.items() if key.startswith(prefix) and on is True]


def _read(file: Path) -> Any:
    """Parsed JSON; None where there is none that can be read."""
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            return None
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
