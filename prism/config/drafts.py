"""A model that guesses tokens for another (``speculative.draft``), by the files of both: what it takes, and whether it
fits. Nothing is loaded, and SGLang is not asked.

EAGLE's drafts (Li et al. 2024, "EAGLE", section 4; 2025, "EAGLE-3", section 3) see what layers of the other model made
of a token, and take its embedding and, but for EAGLE-3's with a vocabulary of their own, its head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from prism.config.engine_args import registries
from prism.config.errors import ModelFilesError
from prism.config.forecast import KvKind, Obstacle, kv_kind
from prism.config.model_files import ModelFacts, facts_from, model_config, model_folder, stored_tensors
from prism.config.model_kinds import architectures, text_config
from prism.core.specs import ModelSpec, SpeculativeAlgorithm

_SEEN_LAYERS: Final = 3
"""Layers that an EAGLE-3 draft sees unless its configuration says which."""
_LEAST_LAYERS: Final = 7
"""SGLang shows those before the layers 2, n / 2 and n - 3, which are three only in models with so many."""


def with_draft(spec: ModelSpec, base: Path, dtype: str) -> ModelSpec:
    """``spec`` with the sizes of the model that guesses for it, whose files are fetched if they are not here. Raises
    ``ModelFilesError``."""
    assert spec.speculation is not None
    folder = model_folder(spec.speculation.draft, base)
    facts = draft_facts(folder, dtype)
    return replace(
        spec,
        weight_bytes=spec.weight_bytes + facts.weight_bytes,
        shape=replace(spec.shape, guesser_kv_bytes=facts.shape.kv_bytes_per_token),
        speculation=replace(spec.speculation, draft=str(folder)),
    )


def draft_facts(folder: Path, dtype: str) -> ModelFacts:
    """What the files of a model that guesses say. Raises ``ModelFilesError``."""
    found = stored_tensors(folder)
    return facts_from(model_config(folder), list(found.values()), dtype, str(folder / "config.json"))


def draft_obstacles(
    algorithm: SpeculativeAlgorithm, config: Mapping[str, Any], folder: Path, tp: int
) -> Iterator[Obstacle]:
    """Why the model in ``folder`` cannot guess for that with ``config``. Raises ``ModelFilesError`` where its files
    cannot be read."""
    draft, ours, theirs = model_config(folder), text_config(config), text_config(model_config(folder))
    yield from _classes(algorithm, config, draft)
    tensors = stored_tensors(folder)
    eagle3 = algorithm is SpeculativeAlgorithm.EAGLE3
    sees = theirs.get("target_hidden_size") if eagle3 else None
    if (sees or theirs.get("hidden_size")) != ours.get("hidden_size"):
        yield _other(f"sees states of {sees or theirs.get('hidden_size')} elements, the model's have {_hidden(ours)}")
    if theirs.get("vocab_size") != ours.get("vocab_size"):
        yield _other(f"knows {theirs.get('vocab_size')} tokens, the model {ours.get('vocab_size')}")
    if not eagle3 and theirs.get("tie_word_embeddings"):
        yield _other("ties its embedding to its head, which the engine replaces one by one (`tie_word_embeddings`)")
    if eagle3:
        yield from _layers(ours, theirs)
        yield from _vocabulary(theirs, {name.split(".")[-1] for name in tensors})
    kv_heads = int(theirs.get("num_key_value_heads") or theirs.get("num_attention_heads") or 1)
    if kv_heads < tp or kv_heads % tp:
        yield _other(f"has {kv_heads} heads of keys, which {tp} devices cannot share")


def _hidden(config: Mapping[str, Any]) -> object:
    return config.get("hidden_size")


def _classes(
    algorithm: SpeculativeAlgorithm, config: Mapping[str, Any], draft: Mapping[str, Any]
) -> Iterator[Obstacle]:
    known = registries()
    ending = "Eagle3" if algorithm is SpeculativeAlgorithm.EAGLE3 else "Eagle"
    able = known.shows_layers if algorithm is SpeculativeAlgorithm.EAGLE3 else known.shares_head
    if not any(name in able for name in architectures(config)):
        names = ", ".join(architectures(config))
        yield Obstacle(f"{algorithm.value} has no way to see what {names} computes", "the same without `speculative`")
    if not any(name.endswith(ending) and name in known.architectures for name in architectures(draft)):
        found, choices = ", ".join(architectures(draft)), [n for n in known.architectures if n.endswith(ending)]
        yield _other(f"is a {found or 'model without a class'}, not one of {', '.join(choices)} (`architectures`)")
    if kv_kind(draft) is not KvKind.PLAIN:
        yield _other(f"keeps {kv_kind(draft).value}")


def _layers(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[Obstacle]:
    """Whether the layers that an EAGLE-3 draft sees are in the model."""
    layers = int(ours.get("num_hidden_layers") or 0)
    said = (theirs.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    wanted = int(theirs.get("num_aux_hidden_states") or (len(said) if said else _SEEN_LAYERS))
    if said:
        there = {layer for layer in said if isinstance(layer, int) and 0 <= layer < layers - 1}
        if len(there) != wanted:
            yield _other(f"sees what the layers {said} made, of which the model shows {sorted(there)}")
    elif layers < _LEAST_LAYERS or wanted != _SEEN_LAYERS:
        yield _other(
            f"does not say which layers it sees (`eagle_config.eagle_aux_hidden_state_layer_ids`), and a model of "
            f"{layers} shows no {wanted} unasked"
        )


def _vocabulary(theirs: Mapping[str, Any], tensors: set[str]) -> Iterator[Obstacle]:
    """Whether an EAGLE-3 draft says which tokens it guesses."""
    if theirs.get("tie_word_embeddings"):
        return
    if "draft_vocab_size" not in theirs:
        yield _other("does not say how many tokens it guesses (`draft_vocab_size`)")
    elif theirs["draft_vocab_size"] not in (None, theirs.get("vocab_size")) and "d2t" not in tensors:
        yield _other(f"guesses {theirs['draft_vocab_size']} tokens and does not say which (a tensor `d2t`)")


def _other(why: str) -> Obstacle:
    return Obstacle(f"its draft {why}", "a draft made for this model, or none")


def draft_problems(
    algorithm: SpeculativeAlgorithm, draft: str, base: Path, config: Mapping[str, Any], tp: int, *, download: bool
) -> Iterator[str]:
    """:func:`draft_obstacles` in words; of a draft that is not here and may not be fetched nothing is known."""
    try:
        folder = model_folder(draft, base, download=download)
    except ModelFilesError as error:
        if download or not _is_hub(draft, base):
            yield f"the draft {error}"
        return
    try:
        yield from (str(obstacle) for obstacle in draft_obstacles(algorithm, config, folder, tp))
    except ModelFilesError as error:
        yield f"its draft: {error}"


def _is_hub(path: str, base: Path) -> bool:
    return not (base / Path(path).expanduser()).exists() and not path.startswith((".", "/", "~"))
