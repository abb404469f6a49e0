"""Some pieces of a model: 0 the embedding, 1..L its decoder layers, L+1 the last norm and the head.

The model's own ``forward`` runs them, with other things where its loop looks for layers::

    for layer in self.layers:      0    1    2    3    4        to run layers 2 and 3
        h, r = layer(h, r, ..)     pass pass real real end
                                             ^         ^
                                             begins with the state that came, whatever it is given
                                                       leaves the loop with the state that it is given

Whatever models do around their layers (scaled embeddings, rotary tables, zero allocators) is done as ever, and each
layer has its own number. SGLang's pipeline parallelism is not used: what it does with bounds that change differs from
model to model, and half of the models have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from prism.remote.pieces import is_apart, layers_of, piece_of
from sglang_patches.kv_guard import UnsupportedModel

State = tuple[Any, Any]
"""Hidden states and residual, ``[tokens, hidden]``; the residual is None before the first layer, and between layers of
a model that has none."""

_HIDDEN: Final = "hidden_states"
_RESIDUAL: Final = "residual"
_GIVEN: Final = frozenset(
    {
        "attention_mask",
        "cache_position",
        "captured_last_layer_outputs",
        "forward_batch",
        "gemm_output_zero_allocator",
        "input_ids",
        "layer_id",
        "llama_4_scaling",
        "next_full_attention_layer_id",
        "output_attentions",
        "output_router_logits",
        "past_key_values",
        "per_layer_input",
        "position_embeddings",
        "position_embeddings_global",
        "position_embeddings_local",
        "position_ids",
        "positions",
        "post_residual_addition",
        "prev_topk_indices",
        "use_cache",
        "zero_allocator",
    }
)
"""What layers get beside their state that follows from the batch (``prev_topk_indices`` with pools that are refused
only): each engine makes it anew. Anything else may be what the layer before says."""
_OF_EMBEDDING: Final = "per_layer_input"
"""Follows from the embedding, too, which is then needed wherever a layer runs."""


class _End(Exception):
    """The loop came to the first layer that is not to run, with this state."""

    def __init__(self, state: State) -> None:
        super().__init__()
        hidden, residual = state
        if getattr(hidden, "_sglang_needs_allreduce_fusion", False):  # the next norm would have added up
            from sglang.srt.distributed import tensor_model_parallel_all_reduce

            hidden = tensor_model_parallel_all_reduce(hidden)
        self.state = hidden, residual


class _Taking:
    """How a layer takes its state and gives it back."""

    def __init__(self, layer: Any) -> None:
        self.names = list(inspect.signature(layer.forward).parameters)
        named = inspect.signature(layer.forward).parameters.values()
        plain = [one.name for one in named if one.kind is not one.VAR_KEYWORD]
        self.problem = "" if _HIDDEN in plain else f"a layer without {_HIDDEN}"
        if strange := sorted({*plain} - _GIVEN - {_HIDDEN, _RESIDUAL}):
            self.problem = f"layers that get {', '.join(strange)}"
        self.residual = _RESIDUAL in plain
        self.of_embedding = _OF_EMBEDDING in plain

    def state(self, args: Sequence[Any], named: dict[str, Any]) -> State:
        """As the layer is given it."""
        return self._find(_HIDDEN, args, named), self._find(_RESIDUAL, args, named) if self.residual else None

    def _find(self, name: str, args: Sequence[Any], named: dict[str, Any]) -> Any:
        at = self.names.index(name)
        return args[at] if at < len(args) else named.get(name)

    def given(self, state: State, args: Sequence[Any], named: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with this state, in the shape of the one that is there."""
        changed, named = list(args), dict(named)
        shape = self._find(_HIDDEN, args, named).shape
        for name, value in ((_HIDDEN, state[0]), (_RESIDUAL, state[1]))[: 1 + self.residual]:
            value = value if value is None else value.view(shape)
            if (at := self.names.index(name)) < len(changed):
                changed[at] = value
            else:
                named[name] = value
        return changed, named


class ModelPieces:
    """The pieces of ``model``. Raises :class:`PatchError` for a model whose layers get more than a state from each
    other, or cannot be told from the rest."""

    def __init__(self, model: Any, hidden_size: int) -> None:
        self.model, self._hidden_size = model, hidden_size
        self._parent, self._attribute, self._layers = _decoder_layers(model)
        self.layers = len(self._layers)
        self.count = self.layers + 2
        self._taking = [_Taking(layer) for layer in self._layers]
        if problem := next((one.problem for one in self._taking if one.problem), ""):
            raise _whole_only(model, problem)
        outside = [name for name, _ in model.named_parameters() if not 1 <= self.piece_of(name) <= self.layers]
        self._apart = all(map(is_apart, outside)) and not any(one.of_embedding for one in self._taking)
        """Layers run where embedding and head are not."""
        self._forward = model.forward
        self._returned: int | None = None
        """Of how many values layers return a tuple; 0: the hidden states by themselves. None: nobody knows yet."""
        self._first = self._layers[0].register_forward_hook(self._saw)
        self.held: Callable[[], frozenset[int]] = lambda: frozenset(range(self.count))
        """Pieces whose weights are here."""
        self.computing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around each run."""

    @property
    def decoder(self) -> Any:
        """The part of the model whose loop runs the layers."""
        return self._parent

    def tensors_before(self, piece: int) -> range:
        """Of how many tensors the state before ``piece`` may be made: some layers name a residual and leave it out."""
        return range(0, 1) if piece == 0 else range(1, 2 if piece == 1 or not self._taking[0].residual else 3)

    def run(self, first: int, end: int, state: State | None, ids: Any, positions: Any, batch: Any) -> Any:
        """Run pieces [first, end), at least one. ``state`` goes in unless ``first`` is 0; a state comes out, or
        SGLang's ``LogitsProcessorOutput`` when the head is among the pieces."""
        with self.computing(), self._shown(self._loop(first, end, state)), self._without_embedding(first, end, state):
            try:
                found = self._forward(ids, positions.clone(), batch)  # Gemma-3 with images counts them up in place
            except _End as over:
                hidden, residual = over.state
                return _flat(hidden), None if residual is None else _flat(residual)
        if end < self.count:
            raise UnsupportedModel(f"{type(self.model).__name__} does not run its layers one after the other")
        return found

    def piece_of(self, name: str) -> int:
        """The piece that the parameter ``name`` belongs to."""
        return piece_of(name, self.layers)

    def usable(self, held: frozenset[int]) -> frozenset[int]:
        """Of the pieces ``held`` those that run for others: none, where layers look at what comes with embedding or
        head and these are not here."""
        return held if self._apart or held >= {0, self.count - 1} else frozenset()

    def close(self) -> None:
        """The model is SGLang's alone again."""
        self._first.remove()

    def _saw(self, layer: Any, given: Any, returned: Any) -> None:
        self._returned = len(returned) if isinstance(returned, tuple) else 0
        self._first.remove()

    def _loop(self, first: int, end: int, state: State | None) -> list[Any]:
        """What the model's loop is to find where its layers are."""
        begin, stop = max(first - 1, 0), min(end - 1, self.layers)
        both = list(zip(self._layers, self._taking, strict=True))
        found: list[Any] = [_Pass(*one, self._returned_by) for one in both[:begin]]
        if state is not None and begin == self.layers:  # the head alone
            found[-1].state = state
        elif state is not None:
            found.append(_Begin(*both[begin], state))
        found += self._layers[len(found) : stop]
        if end == self.count:
            return found
        if stop == self.layers:
            found[-1] = _Last(*both[-1], found[-1])
        return found + [_Stop(*one) for one in both[stop:]]

    def _returned_by(self, taking: _Taking, state: State, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """``state`` as a layer would return it that was called so."""
        if self._returned is None:
            self._try_a_layer(taking, args, named)
        if self._returned == 0:
            return state[0]
        return (state[0], state[0] if state[1] is None else state[1], None)[: self._returned]

    def _try_a_layer(self, taking: _Taking, args: Sequence[Any], named: dict[str, Any]) -> None:
        """To see what it returns. What it writes to the KV is written again if it is to run on this batch, and read by
        nobody if not."""
        held = self.held()
        one = next(i for i in range(self.layers) if i + 1 in held)
        copies = tuple(None if part is None else part.clone() for part in taking.state(args, named))
        again, with_names = self._taking[one].given((copies[0], copies[1]), args, named)
        returned = self._layers[one](*again, **with_names)
        if self._returned is None:
            self._saw(self._layers[one], (), returned)

    @contextmanager
    def _shown(self, layers: list[Any]) -> Iterator[None]:
        """Where the model finds its layers."""
        whole = layers == list(self._layers)
        if not whole:
            self._parent.__dict__[self._attribute] = layers  # looked at before submodules are
        try:
            yield
        finally:
            if not whole:
                del self._parent.__dict__[self._attribute]

    @contextmanager
    def _without_embedding(self, first: int, end: int, state: State | None) -> Iterator[None]:
        """The embedding's weights may be elsewhere; what it says means nothing then, and is of the type of the state
        that came (of a quantised layer's parameters none may be of it)."""
        held, blank = self.held(), list[Any]()
        if state is not None and end < self.count:
            blank = [child for name, child in self._parent.named_children() if self._is_away(name, child, held)]
        if blank and any(one.of_embedding for one in self._taking):
            raise UnsupportedModel(f"layers that get {_OF_EMBEDDING} run where the embedding is, and it is not here")
        dtype = torch.float32 if state is None else state[0].dtype

        def nothing(ids: Any, *args: Any, **named: Any) -> torch.Tensor:
            return torch.zeros((*ids.shape, self._hidden_size), dtype=dtype, device=ids.device)

        for child in blank:
            child.__dict__["forward"] = nothing
        try:
            yield
        finally:
            for child in blank:
                del child.__dict__["forward"]

    def _is_away(self, name: str, child: Any, held: frozenset[int]) -> bool:
        of_layers = name == self._attribute
        return not of_layers and any(
            self.piece_of(f"{name}.{part}") not in held for part, _ in child.named_parameters()
        )


class _InPlace:
    """Stands where a layer does."""

    prism_runs = False
    """Whether the layer runs (:mod:`sglang_patches.pace`)."""

    def __init__(self, layer: Any, taking: _Taking) -> None:
        self._layer, self._taking = layer, taking

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class _Pass(_InPlace):
    """Runs elsewhere, before: gives back what it gets, or ``state``."""

    def __init__(self, layer: Any, taking: _Taking, returned: Callable[..., Any]) -> None:
        super().__init__(layer, taking)
        self._returned = returned
        self.state: State | None = None

    def __call__(self, *args: Any, **named: Any) -> Any:
        hidden, residual = given = self._taking.state(args, named)
        if self.state is not None:
            came, residual = self.state
            given = came.view(hidden.shape), None if residual is None else residual.view(hidden.shape)
        return self._returned(self._taking, given, args, named)


class _Begin(_InPlace):
    """The first that runs here: with the state that came."""

    prism_runs = True

    def __init__(self, layer: Any, taking: _Taking, state: State) -> None:
        super().__init__(layer, taking)
        self._state = state

    def __call__(self, *args: Any, **named: Any) -> Any:
        args_now, named_now = self._taking.given(self._state, args, named)
        return self._layer(*args_now, **named_now)


class _Stop(_InPlace):
    """The first that does not."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        raise _End(self._taking.state(args, named))


class _Last(_InPlace):
    """The model's last, behind which the head is not to run."""

    prism_runs = True

    def __init__(self, layer: Any, taking: _Taking, run: Callable[..., Any]) -> None:
        super().__init__(layer, taking)
        self._run = run

    def __call__(self, *args: Any, **named: Any) -> Any:
        returned = self._run(*args, **named)
        both = returned if isinstance(returned, tuple) else (returned,)
        raise _End((both[0], both[1] if self._taking.residual else None))


def _flat(state: Any) -> Any:
    return state.reshape(-1, state.shape[-1])


def _decoder_layers(model: Any) -> tuple[Any, str, list[Any]]:
    """The module that has them, under which name, and they."""
    count = layers_of(name for name, _ in model.named_parameters())
    found = []
    for path, module in model.named_modules():
        for name, child in module.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == count:
                prefix = f"{path}.{name}" if path else name
                if all(piece_of(f"{prefix}.{i}.x", count) == i + 1 for i in range(count)):
                    found.append((module, name, list(child)))
    if len(found) > 1:
        found = [one for one in found if _attends(one[2][0])]
    if len(found) != 1 or not count:
        raise _whole_only(model, "its decoder layers are not told from the rest")
    return found[0]


def _attends(layer: Any) -> bool:
    from sglang.srt.layers.radix_attention import RadixAttention

    return any(isinstance(module, RadixAttention) for module in layer.modules())


def _whole_only(model: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{type(model).__name__} runs as a whole only: {why}")
