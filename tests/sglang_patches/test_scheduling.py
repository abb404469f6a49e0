"""Requests that go on in another engine: what they bring is where SGLang looks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.rig import codec

pytestmark = pytest.mark.filterwarnings("ignore")  # SGLang and torch warn of many things when they are imported


def extended(media: Any, count: int) -> Any:
    codec()
    from sglang_patches.scheduling import extend_positions

    extend_positions(media, count)
    return media


def test_generated_tokens_of_a_resumed_request_have_positions_behind_the_prompt() -> None:
    # two tokens of text, an image of 1 x 2, one token of text, whose place is behind the image's longer side
    prompt = torch.tensor([[0, 1, 2, 2, 4], [0, 1, 2, 2, 4], [0, 1, 2, 3, 4]])
    found = extended(SimpleNamespace(mrope_positions=prompt), 3).mrope_positions
    assert torch.equal(found[:, :5], prompt)
    assert found[:, 5:].tolist() == [[5, 6, 7]] * 3


def test_what_has_one_position_per_token_stays() -> None:
    assert extended(SimpleNamespace(mrope_positions=None), 3).mrope_positions is None
    assert extended(None, 3) is None
