"""What a loader makes of a model: tensors that it put in the place of parameters or hung on modules as attributes, and
the numbers and flags that go with them (quantisation repacks weights and tells its kernels so). Recorded when the
model was loaded, put back when an image fills it, so that nothing is processed twice.

What happened before loading, in the model's construction, happens again by itself and is not recorded.
"""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import torch

from prism.core.errors import PrismError
from prism.weights.packs.format import DTYPE_BITS

HELPERS: Final = ("quant_method", "scheme", "kernel")
"""Attributes of a module, or of such an object, that hold objects in which loaders keep state of that module."""
PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
_TORCHS_OWN: Final = frozenset(vars(torch.nn.Module()))
_LOADERS_OWN: Final = frozenset(
    ("_cached_params_dict", "routed_experts_weights_of_layer", "_routed_experts_weights_of_layer")
)
"""Attributes by which SGLang's models find parameters while they load; nothing reads them when the model runs."""


RECORDS: Final = {"bitsandbytes.functional:QuantState"}
"""Classes (``MODULE:NAME``) whose objects are their attributes and nothing else."""


class Unrecordable(PrismError):
    """The loader left something that an image cannot hold."""


class HolderState(msgspec.Struct, frozen=True, array_like=True):
    """One module or helper, ``path`` as :func:`holders` names it."""

    path: str
    removed: list[str]
    """Members that the loader took away."""
    tensors: dict[str, str]
    """Member -> ``parameter``, ``buffer`` or ``attribute``: its tensor is in the image, as :func:`tensor_name`."""
    values: dict[str, Any]
    """Plain attributes that it set, as :func:`_written`."""
    marks: dict[str, dict[str, Any]]
    """Parameter -> attributes that it hung on it."""
    fresh: list[str]
    """Parameters that are other objects than before, without what construction hung on those."""


def holders(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module by its name, and its helpers as ``NAME#HELPER``; in a fixed order."""
    for name, module in model.named_modules():
        yield from holders_in(name, module)


def holders_in(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """``holder`` itself (a module, without its children), its helpers, and theirs."""
    yield name, holder
    for helper in HELPERS:
        found = vars(holder).get(helper)
        if found is not None and hasattr(found, "__dict__") and not isinstance(found, torch.nn.Module | type):
            yield from holders_in(f"{name}#{helper}", found)


def tensor_name(path: str, member: str) -> str:
    return f"{path}.{member}" if path else member


def members(holder: Any) -> Iterator[tuple[str, str, Any]]:
    """(Name, kind, value) of everything in ``holder`` that matters when it runs, but its children."""
    if not isinstance(holder, torch.nn.Module):
        yield from ((name, ATTRIBUTE, value) for name, value in vars(holder).items())
        return
    yield from ((name, PARAMETER, value) for name, value in holder._parameters.items())
    yield from ((name, BUFFER, value) for name, value in holder._buffers.items())
    passing = _TORCHS_OWN | _LOADERS_OWN
    yield from ((name, ATTRIBUTE, value) for name, value in vars(holder).items() if name not in passing)


def tensors_of(holder: Any) -> Iterator[torch.Tensor]:
    """Every tensor that is a member of ``holder``."""
    yield from (value for _, _, value in members(holder) if isinstance(value, torch.Tensor))


@dataclass(frozen=True, slots=True)
class _Member:
    """A member before loading. Tensors are not kept alive by it."""

    same: Callable[[Any], bool]
    object: Callable[[], Any]
    """The tensor itself, while it exists."""
    marks: Mapping[str, Any]
    objects: frozenset[int]
    """Identities of what is hung on it and cannot be written down."""


class BeforeLoading:
    """A model as its construction left it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen = {
            path: {
                name: _Member(_watch(value), _weakly(value), _marks(value), _objects(value))
                for name, _, value in members(holder)
            }
            for path, holder in holders(model)
        }
        tensors = [t for _, holder in holders(model) for t in tensors_of(holder)]
        self._objects = {id(tensor): weakref.ref(tensor) for tensor in tensors}
        self._modules = {name: None for name, _ in model.named_modules()}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether this very object was there before loading."""
        ref = self._objects.get(id(tensor))
        return ref is not None and ref() is tensor

    def gone(self, model: torch.nn.Module) -> list[str]:
        """The modules that loading took away, without those in them."""
        there = {name for name, _ in model.named_modules()}
        lost = [name for name in self._modules if name not in there]
        return [name for name in lost if parent_of(name) in there]

    def record(self, model: torch.nn.Module) -> tuple[list[HolderState], dict[str, torch.Tensor]]:
        """What loading changed of the modules that are left, and all tensors an image needs by name. Raises
        :class:`Unrecordable`."""
        new = [name for name, _ in model.named_modules() if name not in self._modules]
        if new:
            raise Unrecordable(f"the loader made new modules ({new[0]})")
        states: list[HolderState] = []
        tensors: dict[str, torch.Tensor] = {}
        for path, holder in holders(model):
            state = self._holder(path, holder, tensors)
            if state.removed or state.tensors or state.values or state.marks:
                states.append(state)
        return states, tensors

    def _holder(self, path: str, holder: Any, tensors: dict[str, torch.Tensor]) -> HolderState:
        now = list(members(holder))
        names = {name for name, _, _ in now}
        before = self._seen.get(path, {})
        removed = sorted(before.keys() - names)
        state = HolderState(path, removed, {}, {}, {}, [])
        for name, kind, value in now:
            where, seen = tensor_name(path, name), before.get(name)
            if isinstance(value, torch.Tensor) and (kind != ATTRIBUTE or seen is None or not seen.same(value)):
                state.tensors[name] = kind
                tensors[where] = _storable(where, value)
                if seen is not None and kind == PARAMETER and seen.object() is not value:
                    state.fresh.append(name)
                    seen = None
                if new := _new_marks(where, value, seen, tensors):
                    state.marks[name] = new
            elif not isinstance(value, torch.Tensor) and (seen is None or not seen.same(value)):
                state.values[name] = _written(where, value, tensors)
        return state


def _new_marks(where: str, value: Any, seen: _Member | None, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What loading hung on a parameter, to be written down. Raises :class:`Unrecordable`."""
    plain = _marks(value)
    found = {k: v for k, v in plain.items() if seen is None or seen.marks.get(k, _MISSING) != v}
    objects = frozenset() if seen is None else seen.objects
    for name, mark in vars(value).items() if isinstance(value, torch.Tensor) else ():
        if name not in plain and not callable(mark) and id(mark) not in objects:
            found[name] = _written(f"{where}*{name}", mark, tensors)
    return found


_MISSING: Final = object()


def _watch(value: Any) -> Callable[[Any], bool]:
    """Whether a member is still what it was. Of a tensor also: whether nobody wrote into it."""
    if isinstance(value, torch.Tensor):
        ref, was = weakref.ref(value), _look(value)
        return lambda now: now is not None and now is ref() and _look(now) == was
    with contextlib.suppress(Unrecordable):
        plain = msgspec.msgpack.encode(_written("", value))
        return lambda now: _plain(now) == plain
    return lambda now: now is value


def _weakly(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, torch.Tensor) else lambda: None


def _plain(value: Any) -> bytes | None:
    try:
        return msgspec.msgpack.encode(_written("", value))
    except Unrecordable:
        return None


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), version


def _marks(value: Any) -> dict[str, Any]:
    """What was hung on a parameter and can be written down; functions (its loader) are of no use later."""
    if not isinstance(value, torch.nn.Parameter):
        return {}
    found = {}
    for name, mark in vars(value).items():
        with contextlib.suppress(Unrecordable):
            found[name] = _written(name, mark) if not callable(mark) else _MISSING
    return {name: mark for name, mark in found.items() if mark is not _MISSING}


def _storable(where: str, tensor: torch.Tensor) -> torch.Tensor:
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_meta or kind not in DTYPE_BITS or tensor.is_quantized:
        raise Unrecordable(f"{where} is a tensor of a kind that images do not have ({tensor.layout}, {tensor.dtype})")
    return tensor


def _objects(value: Any) -> frozenset[int]:
    if not isinstance(value, torch.Tensor):
        return frozenset()
    return frozenset(id(mark) for mark in vars(value).values() if not callable(mark) and _plain(mark) is None)


def _written(where: str, value: Any, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """``value`` as MessagePack has it: itself, or ``{KIND: content}``. Tensors in it are added to ``tensors`` under
    names that begin with ``where``. Raises :class:`Unrecordable`, also for tensors when there is nowhere for them."""
    if value is None or type(value) in (bool, float, str) or (type(value) is int and abs(value) < 1 << 63):
        return value
    if type(value) in (list, tuple, torch.Size):
        return {type(value).__name__: [_written(f"{where}.{i}", item, tensors) for i, item in enumerate(value)]}
    if type(value) is dict:
        pairs = enumerate(value.items())
        return {"dict": [[_written(where, k), _written(f"{where}.{i}", v, tensors)] for i, (k, v) in pairs]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if tensors is not None and type(value) is torch.Tensor:
        tensors[where] = _storable(where, value)
        return {"tensor": where}
    kind = f"{type(value).__module__}:{type(value).__qualname__}"
    if kind in RECORDS:
        return {"record": [kind, _written(where, vars(value), tensors)]}
    raise Unrecordable(f"{where} is a {kind.replace(':', '.')}")


def _read(written: Any, place: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of :func:`_written`."""
    if not isinstance(written, dict):
        return written
    ((kind, content),) = written.items()
    match kind:
        case "dict":
            return {_read(key, place): _read(value, place) for key, value in content}
        case "dtype":
            return getattr(torch, content)
        case "tensor":
            return place(content)
        case "record":
            return _record(content[0], _read(content[1], place))
        case _:
            items = [_read(item, place) for item in content]
            return {"Size": torch.Size, "tuple": tuple, "list": list}[kind](items)


def _record(kind: str, attributes: dict[str, Any]) -> Any:
    """An object of one of :data:`RECORDS`."""
    module, _, name = kind.partition(":")
    made = object.__new__(getattr(importlib.import_module(module), name))
    vars(made).update(attributes)
    return made


def parent_of(name: str) -> str:
    """The name of the module in which the module ``name`` is."""
    return name.rpartition(".")[0]


def take_away(model: torch.nn.Module, names: list[str]) -> None:
    """Removes the modules ``names``, as far as they are there (see :meth:`BeforeLoading.gone`)."""
    for name in names:
        parent = model.get_submodule(parent_of(name))
        parent._modules.pop(name.rpartition(".")[2], None)


def restore(model: torch.nn.Module, states: list[HolderState], place: Callable[[str], torch.Tensor]) -> None:
    """Makes of ``model``, as constructed, what loading made of it; ``place`` gives the image's tensor of a name. Raises
    ``KeyError`` for what the image lacks and ``AttributeError`` for what the model lacks."""
    known = {state.path: state for state in states}
    for path, holder in holders(model):
        state = known.pop(path, None)
        if state is None:
            continue
        for name in state.removed:
            delattr(holder, name)
        for name in state.fresh:
            holder._parameters[name] = None
        for name, kind in state.tensors.items():
            _hang(holder, name, kind, place(tensor_name(path, name)))
        for name, marks in state.marks.items():
            for mark, value in marks.items():
                setattr(getattr(holder, name), mark, _read(value, place))
        for name, value in state.values.items():
            setattr(holder, name, _read(value, place))
    if known:
        raise AttributeError(f"the model has no {next(iter(known))}")


def _hang(holder: Any, name: str, kind: str, place: torch.Tensor) -> None:
    """``place`` as the member ``name`` of ``holder``. An object that fits is kept: others may refer to it."""
    before = getattr(holder, name, None)
    if kind == PARAMETER:
        if not isinstance(before, torch.nn.Parameter) or before.dtype != place.dtype:
            if before is not None:
                delattr(holder, name)
            setattr(holder, name, torch.nn.Parameter(place, requires_grad=False))
        elif _at(before) != _at(place):
            before.data = place
    elif kind == BUFFER and name in holder._buffers:
        holder._buffers[name] = place
    else:
        if hasattr(holder, name):
            delattr(holder, name)
        if kind == BUFFER:
            holder.register_buffer(name, place, persistent=False)
        else:
            vars(holder)[name] = place


def _at(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
