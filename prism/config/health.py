"""What would fail at a model's first request, as far as its files say it: found before, without an engine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from prism.config.adapters import adapter_facts, misfits
from prism.config.catalog import Catalog
from prism.config.drafts import draft_problems
from prism.config.engine_args import registries
from prism.config.errors import ModelFilesError
from prism.config.forecast import guessing_obstacles, obstacles
from prism.config.model_files import local_folder, model_config, model_folder
from prism.config.model_kinds import architectures, is_sentence_encoder, kind_of, pooling_problem
from prism.config.sections.model import AdapterConfig, ModelConfig
from prism.config.units import format_size
from prism.core.specs import DeviceKind, ModelKind, ModelSpec

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken")
HUB_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Health:
    """What one look at a model found. ``spec``: None when its sizes cannot be known."""

    spec: ModelSpec | None
    problems: tuple[str, ...]


class Hub:
    """Asks Hugging Face whether it has a model, and no more once it does not answer: one look at a catalog of hundreds
    of models on a machine without a network is soon over."""

    def __init__(self) -> None:
        self._away = ""

    def problem(self, model: ModelConfig) -> str | None:
        """Why the model could not be fetched, None when it could; takes :data:`HUB_S` at most."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        try:
            if not self._away:
                HfApi().model_info(model.path, revision=model.revision, timeout=HUB_S)
        except HfHubHTTPError as error:  # it answered: there is no such model or revision, or it needs a token
            return f"model {model.path} cannot be fetched from Hugging Face: {str(error).splitlines()[0]}"
        except Exception as error:
            self._away = f"is not on this machine, and Hugging Face does not answer ({type(error).__name__})"
        return f"model {model.path} {self._away}" if self._away else None


def examine_model(catalog: Catalog, name: str, hub: Hub | None = None, devices: Collection[DeviceKind] = ()) -> Health:
    """Reads headers, templates and names of files of the model or adapter called ``name``. Of one that is not on this
    machine ``hub`` is asked whether it exists, which is quick; None: its headers are fetched. ``devices``: the kinds
    that are there; none: they are not known, and what only some can run is passed over."""
    if (adapter := catalog.adapters_by_name.get(name)) is not None:
        return Health(None, tuple(_adapter_problems(catalog, adapter, download=hub is None)))
    model, spec = catalog.model(name), None
    problems: list[str] = []
    try:
        folder = local_folder(model.path, catalog.base) or _cached(model, catalog.base)
        if folder is None and hub is not None:
            problems += [why for why in (hub.problem(model),) if why is not None]
        else:
            spec = catalog.spec(name)
            problems += [] if folder is None else _foretold(model, folder, devices, catalog.base, download=hub is None)
    except ModelFilesError as error:
        folder = None
        problems.append(str(error))
    problems += _template_problems(model, catalog.base, folder)
    if folder is not None and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        problems.append(f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)})")
    return Health(spec, tuple(problems))


def _foretold(
    model: ModelConfig, folder: Path, devices: Collection[DeviceKind], base: Path, *, download: bool
) -> list[str]:
    config, sentence_encoder = model_config(folder), is_sentence_encoder(folder)
    found = [str(o) for o in obstacles(config, model.engine_args, model.kind, sentence_encoder, devices)]
    kind = model.kind or kind_of(config, sentence_encoder)
    if model.speculative is not None:
        found += [str(o) for o in guessing_obstacles(config, model.engine_args, kind, devices)]
        if (draft := model.speculative.draft) is not None:
            found += draft_problems(model.speculative.algorithm, draft, base, config, model.tp, download=download)
    if kind is ModelKind.EMBED:
        found += [why for why in (pooling_problem(folder, architectures(config)),) if why is not None]
    return found


def _adapter_problems(catalog: Catalog, adapter: AdapterConfig, download: bool) -> Iterator[str]:
    """Why no engine of its base can serve ``adapter``. One that may not be downloaded has no problem that is known."""
    try:
        if not download and local_folder(adapter.adapter, catalog.base) is None:
            return
        facts, spec = adapter_facts(adapter.adapter, catalog.base, adapter.revision), catalog.spec(adapter.base)
    except ModelFilesError as error:
        yield str(error)
        return
    for why in misfits(facts, spec.lora, spec.shape):
        yield f"adapter {facts.folder} {why}"


def too_large(spec: ModelSpec, largest_device_bytes: int) -> str | None:
    """Why the model fits on no device, when the largest has so many bytes; None when it may fit."""
    needed_bytes = -(-spec.weight_bytes // spec.tp) + spec.min_kv_bytes
    if needed_bytes <= largest_device_bytes:
        return None
    each = f" on each of {spec.tp} devices" if spec.tp > 1 else ""
    return (
        f"needs {format_size(needed_bytes)}{each} (weights and min_kv_memory), "
        f"the largest device has {format_size(largest_device_bytes)}"
    )


def _cached(model: ModelConfig, base: Path) -> Path | None:
    """The folder of a Hugging Face model in the local cache."""
    try:
        return model_folder(model.path, base, model.revision, download=False)
    except ModelFilesError:
        return None


def _template_problems(model: ModelConfig, base: Path, folder: Path | None) -> Iterator[str]:
    from prism.config.templates import syntax_error  # Jinja is slow to import

    for where, text in _templates(model, base, folder):
        if text is None:
            known = ", ".join(registries().chat_template)
            yield f"chat_template {where!r} is neither a file nor a template of SGLang; choices: {known}"
        elif (why := syntax_error(text)) is not None:
            yield f"{where}: is no chat template: {why}"


def _templates(model: ModelConfig, base: Path, folder: Path | None) -> Iterator[tuple[str, str | None]]:
    """(Where, text) of the Jinja templates that would be used; the text is None for what there is not."""
    if model.chat_template is not None:
        file = base / model.chat_template
        if file.is_file():
            yield from [(str(file), _text(file))] if file.suffix == ".jinja" else []
        elif model.chat_template not in registries().chat_template:
            yield model.chat_template, None
        return
    if folder is None:
        return
    if (file := folder / "chat_template.jinja").is_file():
        yield str(file), _text(file)
    elif (file := folder / "tokenizer_config.json").is_file():
        try:
            found: Any = json.loads(_text(file)).get("chat_template")
        except (ValueError, AttributeError, RecursionError):
            return  # the tokenizer library says it better
        named = found if isinstance(found, list) else [{"template": found}]
        texts = (entry.get("template") for entry in named if isinstance(entry, dict))
        yield from ((str(file), text) for text in texts if isinstance(text, str))


def _text(file: Path) -> str:
    return file.read_text("utf-8", errors="replace")
