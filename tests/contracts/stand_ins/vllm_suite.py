"""What vLLM's tests import, without vLLM: its server fixture is the running Prism server, anything else of vLLM's code
skips the test that uses it."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import openai
import pytest

from .marks import Marks

URL = os.environ["PRISM_CONTRACTS_URL"]
MODELS: dict[str, str] = json.loads(os.environ["PRISM_CONTRACTS_MODELS"])
"""The folder of the demo model behind each name that the suite asks for."""
CLIENT_LIMIT_S = 120.0


class RemoteOpenAIServer:
    """vLLM's fixture of this name starts a server with ``arguments``; here one runs already, whatever they are."""

    def __init__(self, model: str, arguments: Sequence[str], **options: Any) -> None:
        if model not in MODELS:
            pytest.skip(f"no demo model stands for {model}")

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def url_for(self, *parts: str) -> str:
        return "/".join([URL, *parts])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": f"{URL}/v1", "api_key": "any", "max_retries": 0, "timeout": CLIENT_LIMIT_S, **options}


class ModelConfig:
    """The one thing tests ask vLLM's: how many tokens the model knows."""

    def __init__(self, model: str, **options: Any) -> None:
        self._config = json.loads((Path(MODELS[model]) / "config.json").read_text())

    def get_vocab_size(self) -> int:
        return int(self._config["vocab_size"])


def get_tokenizer(tokenizer_name: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODELS[tokenizer_name])


class Absent:
    """A name of vLLM's that nothing here has: using it skips the test."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        pytest.skip(f"tests vLLM's own code ({self._name}), not a server", allow_module_level=True)

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __or__(self, other: object) -> Absent:
        return self

    __ror__ = __or__


KNOWN: dict[str, dict[str, Any]] = {
    "vllm.config": {"ModelConfig": ModelConfig},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    # Adapters: their fixtures only have to come back, the tests with them are in the list of those that do not apply.
    "vllm.transformers_utils.repo_utils": {"hf_api": lambda: SimpleNamespace(snapshot_download=lambda **_: "adapter")},
}


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def exec_module(self, module: ModuleType) -> None:
        def missing(name: str) -> Absent:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{module.__name__}.{name}")

        vars(module).update(KNOWN.get(module.__name__, {}), __getattr__=missing)


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, _Finder())
    utils = ModuleType("tests.utils")
    vars(utils).update(RemoteOpenAIServer=RemoteOpenAIServer, ROCM_EXTRA_ARGS=[])
    sys.modules["tests.utils"] = utils
    rules = json.loads(os.environ["PRISM_CONTRACTS_RULES"])
    config.pluginmanager.register(Marks(rules, Path(os.environ["PRISM_CONTRACTS_RESULTS"])))
