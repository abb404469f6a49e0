"""Embeddings on real engines: right, beside models that generate, and answered once although an engine dies."""

from __future__ import annotations

import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from .server import DEMOS, Server, complete, greedy, prompts, until

pytestmark = [pytest.mark.engine, pytest.mark.slow]
MODEL, PATH = "demo-vectors", DEMOS[1]


@lru_cache(maxsize=1)
def _reference(path: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(1)
    return AutoModel.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


def vector(path: Path, text: str) -> Any:
    """What Hugging Face makes of the text's last token, at length 1."""
    import torch

    model, tokenizer = _reference(str(path))
    with torch.no_grad():
        last = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
    return np.asarray(last / last.norm())


def embed(server: Server, texts: list[str]) -> Any:
    made = server.client.embeddings.create(model=MODEL, input=texts)
    return np.asarray([row.embedding for row in made.data])


def test_texts_are_embedded_beside_models_that_generate(server: Server, demo_models: Path) -> None:
    texts = list(prompts(6))
    found = embed(server, texts)
    expected = [vector(demo_models / PATH, text) for text in texts]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    prompt = texts[0]
    assert complete(server.client, DEMOS[1], prompt, 8) == greedy(str(demo_models / DEMOS[1]), prompt, 8)
    np.testing.assert_allclose(embed(server, texts[:1]), expected[:1], rtol=1e-3, atol=1e-4)


def test_every_text_is_answered_once_although_the_engine_dies(server: Server, demo_models: Path) -> None:
    texts = [f"{text} number {i}" for i in range(40) for text in prompts(4)]
    expected = embed(server, texts)
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(embed(server, texts)))
    asking.start()
    until(lambda: server.queued() > 0 or found, "texts on their way")
    for pid in server.pids("prism: engine"):
        server.kill(pid)
    asking.join()
    np.testing.assert_allclose(found[0], expected, rtol=1e-3, atol=1e-4)
    until(lambda: server.queued() == 0, "empty queues")


def test_a_completion_is_refused_at_the_front_door(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="embeds texts") as refused:
        server.client.completions.create(model=MODEL, prompt="hi")
    assert refused.value.code == "unsupported_model_kind"
