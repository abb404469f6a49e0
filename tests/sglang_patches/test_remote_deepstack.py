"""Images that go into several layers, over routes of any shape: the same state as with all layers in one place."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.remote_deepstack import SeveralLayers
from sglang_patches.remote_stops import RoutePeer, Stop

LAYERS, HIDDEN, TOKENS = 6, 4, 3
PIECES = LAYERS + 2


class Decoder(torch.nn.Module):
    """Layers that double what they get, and add what images say as the model's own loop does."""

    def forward(self, state: Any, first: int, end: int, input_deepstack_embeds: Any = None) -> Any:
        hidden = torch.ones(TOKENS, HIDDEN) if first == 0 else state[0]
        residual = torch.zeros(TOKENS, HIDDEN) if first == 0 else state[1]
        for layer in range(max(first - 1, 0), min(end - 1, LAYERS)):
            residual = hidden + residual + said(layer - 1, input_deepstack_embeds)
            hidden = residual * 2
        if end == PIECES:
            return hidden + residual + said(LAYERS - 1, input_deepstack_embeds)
        return hidden, residual


def said(layer: int, embeds: Any) -> Any:
    known = embeds is not None and 0 <= layer < embeds.shape[1] // HIDDEN
    return embeds[:, layer * HIDDEN : (layer + 1) * HIDDEN] if known else 0.0


def routed(route: list[Stop], images: int, embeds: Any) -> Any:
    decoder = Decoder()
    model = SimpleNamespace(use_deepstack={"image": True}, deepstack_visual_indexes=[0] * images)
    deep = SeveralLayers(model, decoder)
    state: Any = None
    for stop in deep.stops(route):
        own = stop.first == 0
        state = decoder(state, stop.first, stop.end, input_deepstack_embeds=embeds if own else None)
        state = state if stop.end == PIECES else deep.added(state, stop.end)
    assert deep.added((state, None), 2) == (state, None), "nothing is left for the next batch"
    deep.close()
    return state


@given(st.sets(st.integers(1, PIECES - 1)), st.integers(1, LAYERS))
def test_any_route_adds_what_the_model_would(cuts: set[int], images: int) -> None:
    embeds = torch.arange(TOKENS * images * HIDDEN, dtype=torch.float32).view(TOKENS, -1)
    bounds = [0, *sorted(cuts), PIECES]
    peer = RoutePeer(None)
    route = [Stop(peer if i % 2 else None, first, end) for i, (first, end) in enumerate(pairwise(bounds))]
    whole = Decoder()(None, 0, PIECES, input_deepstack_embeds=embeds)
    assert torch.equal(routed(route, images, embeds), whole)
    assert not torch.equal(whole, Decoder()(None, 0, PIECES)), "images say something"


@pytest.mark.parametrize(
    ("route", "images", "stops"),
    [
        ([(0, 1), (1, 6), (6, 8)], 3, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (6, 8)]),
        ([(0, 3), (3, 7), (7, 8)], 3, [(0, 3), (3, 4), (4, 7), (7, 8)]),
        ([(0, 5), (5, 7), (7, 8)], 3, [(0, 5), (5, 7), (7, 8)]),
        ([(0, 1), (1, 2), (2, 8)], 2, [(0, 1), (1, 2), (2, 3), (3, 8)]),
        ([(0, 1), (1, 7), (7, 8)], 0, [(0, 1), (1, 7), (7, 8)]),
    ],
)
def test_stops_are_one_layer_as_far_as_images_go(
    route: list[tuple[int, int]], images: int, stops: list[tuple[int, int]]
) -> None:
    model = SimpleNamespace(use_deepstack=images or None, deepstack_visual_indexes=[0] * images)
    deep = SeveralLayers(model, Decoder())
    assert [(stop.first, stop.end) for stop in deep.stops([Stop(None, *one) for one in route])] == stops


def test_what_other_batches_hear_is_not_kept() -> None:
    decoder = Decoder()
    model = SimpleNamespace(use_deepstack={"image": True}, deepstack_visual_indexes=[0])
    deep = SeveralLayers(model, decoder)
    decoder(None, 0, PIECES, input_deepstack_embeds=torch.ones(TOKENS, HIDDEN))
    state = (torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN))
    assert deep.added(state, 2) is state
