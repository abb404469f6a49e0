"""Makes SGLang's front-side objects for one model of the catalog."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sglang.srt.managers.tokenizer_manager import TokenizerManager  # noqa: F401  (its import order matters to SGLang)
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import PortArgs, ServerArgs

from prism.config.catalog import Catalog
from prism.config.errors import ModelFilesError
from prism.config.model_files import announced, model_config, model_folder
from prism.config.model_kinds import architectures, image_arguments, pooling_problem
from prism.config.sections.model import ModelConfig
from prism.core.ids import ModelName
from prism.core.specs import ModelKind
from prism.server.broker import Broker
from prism.server.kinds import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, ROUTES, SCORE
from prism.server.models import ServedModel
from prism.server.objectives import Objectives
from prism.server.pooled_serving import ClassifyServing, EmbeddingsServing
from prism.server.scoring import RerankServing, ScoreServing
from prism.server.sglang_manager import FrontManager
from prism.server.sglang_pooling import PooledQueue
from prism.server.sglang_serving import ChatServing, Serving, TextServing

FRONT_ARGS: Final = (
    "tokenizer_path",
    "tokenizer_mode",
    "trust_remote_code",
    "json_model_override_args",
    "completion_template",
    "default_chat_template_kwargs",
    "preferred_sampling_params",
    "sampling_defaults",
    "allow_auto_truncate",
    "dtype",
    "enable_multimodal",
    "mm_process_config",
)
"""Engine arguments that mean something on this side."""


def builder(broker: Broker) -> Callable[[Catalog, ModelConfig], ServedModel]:
    """What :class:`prism.server.models.Models` calls."""

    def build(catalog: Catalog, model: ModelConfig) -> ServedModel:
        folder = model_folder(model.path, catalog.base, model.revision)
        kind = model.kind or announced(model.path, catalog.base, model.revision)[1]
        _check(folder, kind)
        args = ServerArgs(
            **server_args(model, folder, catalog.base, catalog.takes_images),
            is_embedding=kind is not ModelKind.GENERATE,
        )
        ports = PortArgs(**dict.fromkeys(PortArgs.__dataclass_fields__))
        manager = FrontManager(ModelName(model.name), args, ports, broker)
        templates = TemplateManager()
        templates.initialize_templates(
            tokenizer_manager=manager,
            model_path=str(folder),
            chat_template=args.chat_template,
            completion_template=args.completion_template,
        )
        return ServedModel(
            config=model,
            objectives=Objectives.of(model),
            context_tokens=manager.context_len,
            kind=kind,
            manager=manager,
            endpoints=_endpoints(manager, templates, kind),
        )

    return build


def _check(folder: Path, kind: ModelKind) -> None:
    """Raises :class:`ModelFilesError` for a model of which an engine would make other vectors than it was trained
    for."""
    if kind is ModelKind.EMBED and (why := pooling_problem(folder, architectures(model_config(folder)))) is not None:
        raise ModelFilesError(why)


def _endpoints(manager: FrontManager, templates: TemplateManager, kind: ModelKind) -> Mapping[str, Serving]:
    """Of a model of this kind, by route (:data:`prism.server.kinds.ROUTES`)."""
    queue = PooledQueue(manager)
    made: Mapping[str, Callable[[], Serving]] = {
        CHAT: lambda: ChatServing(manager, templates),
        COMPLETIONS: lambda: TextServing(manager, templates),
        EMBEDDINGS: lambda: EmbeddingsServing(manager, queue, kind),
        CLASSIFY: lambda: ClassifyServing(manager, queue, kind),
        SCORE: lambda: ScoreServing(manager, queue, kind),
        RERANK: lambda: RerankServing(manager, queue, kind),
    }
    return {route: made[route]() for route in ROUTES[kind]}


def server_args(model: ModelConfig, folder: Path, base: Path, images: bool = False) -> dict[str, Any]:
    """Arguments of SGLang's ``ServerArgs`` for the front side of ``model``; ``images``: whether requests may have
    them."""
    args: dict[str, Any] = {
        "model_path": str(folder),
        "served_model_name": model.name,
        "device": "cpu",
        "attention_backend": "triton",  # no attention runs here; some architectures refuse to be asked about others
        "disable_cuda_graph": True,
        "skip_server_warmup": True,
        "enable_cache_report": True,
        "log_level": "warning",
        "mem_fraction_static": 0.5,
        "random_seed": 1,
    }
    args |= image_arguments(architectures(model_config(folder)), images)
    args |= {name: value for name, value in model.engine_args.items() if name in FRONT_ARGS}
    if model.context_tokens is not None:
        args["context_length"] = model.context_tokens
    if model.chat_template is not None:
        file = base / model.chat_template
        args["chat_template"] = str(file) if file.is_file() else model.chat_template
    for option in ("reasoning_parser", "tool_call_parser"):
        if getattr(model, option) is not None:
            args[option] = getattr(model, option)
    return args
