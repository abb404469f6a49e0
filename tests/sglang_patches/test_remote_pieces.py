"""Some pieces of a model run as all of them would: whatever its loop, and its layers, look like."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_patches.kv_guard import UnsupportedModel
from sglang_patches.remote_pieces import ModelPieces, State

LAYERS, HIDDEN, VOCABULARY = 4, 8, 16
IDS = torch.tensor([3, 1, 4, 1, 5])
POSITIONS = torch.arange(5)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """As most of SGLang's: the residual goes beside the hidden states."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.mix = at, torch.nn.Linear(HIDDEN, HIDDEN)
        self.ran = 0

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        self.ran += 1
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(self.mix(residual)) * (1 + positions[:, None]), residual


class WithoutResidual(Layer):
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any) -> Any:  # type: ignore[override]
        self.ran += 1
        return hidden_states + torch.tanh(self.mix(hidden_states))


class NamesResidual(Layer):
    """As MiniCPM3's: it gets one, and returns none."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        self.ran += 1
        return hidden_states + torch.tanh(self.mix(hidden_states)), None


class OneOfTuple(Layer):
    """As Gemma-3's, called by name."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self.ran += 1
        return (hidden_states + torch.tanh(self.mix(hidden_states)),)


class ByNumber(Layer):
    """What a layer gets beside the state depends on its number, and on the embedding."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, per_layer_input: Any) -> Any:
        self.ran += 1
        return hidden_states + torch.tanh(self.mix(hidden_states)) + per_layer_input


class Quantised(Layer):
    """None of its parameters is of the type of the states."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        mix, scale = self.mix, 64.0
        del self.mix
        self.packed = torch.nn.Parameter((mix.weight * scale).to(torch.int8), requires_grad=False)

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        self.ran += 1
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(torch.nn.functional.linear(residual, self.packed.double())), residual


class Carries(Layer):
    """Something else goes from layer to layer."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, kv_states: Any) -> Any:
        raise AssertionError("never run")


class Inner(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        self.kind = kind
        self.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(kind(i) for i in range(LAYERS))
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, ids: Any, positions: Any, batch: Any) -> Any:
        hidden, residual = self.embed_tokens(ids) * 3.0, None
        beside = hidden.clone()
        for i in range(len(self.layers)):
            layer = self.layers[i]
            if self.kind is WithoutResidual:
                hidden = layer(positions, hidden, batch)
            elif self.kind is OneOfTuple:
                hidden = layer(positions=positions, hidden_states=hidden, forward_batch=batch)[0]
            elif self.kind is ByNumber:
                hidden = layer(positions, hidden, batch, (i + 1) * beside)
            else:
                hidden, residual = layer(positions, hidden, batch, residual)
        return self.norm(hidden if residual is None else hidden + residual)


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, kind: type[Layer]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Inner(kind)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Any, positions: Any, batch: Any) -> Any:
        return self.lm_head(self.model(ids, positions, batch))

    @property
    def ran(self) -> list[int]:
        return [layer.ran for layer in self.model.layers]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


KINDS = [Layer, WithoutResidual, NamesResidual, OneOfTuple, ByNumber]
CUTS = [(0, 6), (0, 1, 6), (0, 2, 5, 6), (0, 1, 2, 3, 4, 5, 6), (0, 3, 6), (0, 5, 6)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("ran_before", [True, False])
def test_pieces_by_engines_of_their_own_say_what_the_whole_says(
    kind: type[Layer], cuts: tuple[int, ...], ran_before: bool
) -> None:
    """Each part runs in a model of its own; some have never run a step of their own, and do not know what their layers
    return."""
    expected = Model(kind)(IDS, POSITIONS, None)
    state: Any = None
    for first, end in pairwise(cuts):
        model = Model(kind)
        pieces = ModelPieces(model, HIDDEN)
        if ran_before:
            model(IDS, POSITIONS, None)
        before = model.ran
        state = pieces.run(first, end, state, IDS, POSITIONS, None)
        if end < pieces.count:
            assert sum(part is not None for part in state) in pieces.tensors_before(end)
            assert all(part is None or tuple(part.shape) == (len(IDS), HIDDEN) for part in state)
        ran = [after - was for after, was in zip(model.ran, before, strict=True)]
        wanted = [int(first <= i + 1 < end) for i in range(LAYERS)]
        tried = 0 if ran_before or (kind is Layer and first <= 1) else 1
        assert sum(ran) - sum(wanted) in (0, tried) and all(r >= w for r, w in zip(ran, wanted, strict=True))
        assert model(IDS, POSITIONS, None).equal(expected), "the model is as it was"
    assert torch.allclose(state, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [Layer, Quantised])
def test_without_the_embedding_s_weights_nobody_asks_for_them(kind: type[Layer]) -> None:
    """Nor where nobody knows yet what layers return, and one is tried."""
    pieces = ModelPieces(Model(kind).double(), HIDDEN)
    state: State = pieces.run(0, 2, None, IDS, POSITIONS, None)
    expected = pieces.run(2, 4, state, IDS, POSITIONS, None)
    model = Model(kind).double()
    pieces = ModelPieces(model, HIDDEN)
    pieces.held = lambda: frozenset({2, 3})
    model.model.embed_tokens.weight.fill_(float("nan"))
    found = pieces.run(2, 4, state, IDS, POSITIONS, None)
    assert all(map(torch.equal, found, expected))
    by_number = Model(ByNumber)
    pieces = ModelPieces(by_number, HIDDEN)
    pieces.held = lambda: frozenset({2, 3})
    with pytest.raises(UnsupportedModel, match="where the embedding is"):
        pieces.run(2, 4, (state[0], None), IDS, POSITIONS, None)


def test_layers_that_look_at_more_than_themselves_run_where_embedding_and_head_are() -> None:
    layers, ends = frozenset({2, 3}), frozenset({0, LAYERS + 1})
    assert ModelPieces(Model(Layer), HIDDEN).usable(layers) == layers
    shares = Model(Layer)
    shares.model.shared_scale = torch.nn.Parameter(torch.ones(HIDDEN))
    for model in (shares, Model(ByNumber)):
        pieces = ModelPieces(model, HIDDEN)
        assert not pieces.usable(layers) and not pieces.usable(layers | {0})
        assert pieces.usable(layers | ends) == layers | ends


def test_what_cannot_be_cut_is_refused_with_the_reason() -> None:
    with pytest.raises(UnsupportedModel, match="Model runs as a whole only: layers that get kv_states"):
        ModelPieces(Model(Carries), HIDDEN)
    with pytest.raises(UnsupportedModel, match="not told from the rest"):
        ModelPieces(torch.nn.Sequential(torch.nn.Linear(2, 2)), HIDDEN)


def test_a_model_that_does_not_go_through_its_layers_says_so() -> None:
    model = Model(Layer)
    pieces = ModelPieces(model, HIDDEN)
    pieces._forward = lambda ids, positions, batch: SimpleNamespace()
    with pytest.raises(UnsupportedModel, match="one after the other"):
        pieces.run(0, 2, None, IDS, POSITIONS, None)
