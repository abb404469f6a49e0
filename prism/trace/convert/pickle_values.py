"""Read the values of a pickle without executing it.

A pickle is a program for a small stack machine; what makes it dangerous are the opcodes that import names and call
them. This reader walks the opcodes with :mod:`pickletools` (which runs nothing) and builds plain values only. Where the
program wants to import or call something, the reader records *that*: an :class:`Opaque` with the name as text, the
arguments and the state, all plain values again. Nothing is ever imported, called or looked up.
Opcodes outside the list here are refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any, Final

from prism.core.errors import InvalidValue

_MARK: Final = object()

_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_LITERALS: Final = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
)
_PUT: Final = frozenset(("PUT", "BINPUT", "LONG_BINPUT"))
_GET: Final = frozenset(("GET", "BINGET", "LONG_BINGET"))
_NOTHING: Final = frozenset(("PROTO", "FRAME"))


# The last two: a length that nothing could hold is read as such before anything follows it.
_MALFORMED: Final = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    NotImplementedError,
    MemoryError,
    OverflowError,
)


@dataclass(slots=True, eq=False)
class Opaque:
    """What the pickle would have imported (``name``, as ``module.attribute``) or made by calling it with ``args``."""

    name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: list[Any] = field(default_factory=list)
    """What the program would have appended or put into it."""

    def attributes(self) -> dict[str, Any]:
        """The instance attributes that the pickle sets; empty when it sets none."""
        if isinstance(self.state, dict):
            return self.state
        if isinstance(self.state, tuple) and len(self.state) == 2 and isinstance(self.state[1], dict):
            return {**(self.state[0] or {}), **self.state[1]}
        return {}


def read_pickle_values(file: IO[bytes], where: str) -> Any:
    """The value in the pickle ``file`` with :class:`Opaque` for everything that is not plain data. Raises
    :class:`InvalidValue` (naming ``where``, the opcode and its position) for anything malformed or not allowed."""
    machine = _Machine()
    name, position = "", 0
    try:
        for opcode, argument, at in pickletools.genops(file):
            name, position = opcode.name, at or 0
            if name == "STOP":
                return machine.stack.pop()
            machine.step(name, argument)
    except _MALFORMED as exc:
        raise InvalidValue("pickle", f"{name} at byte {position}", str(exc) or "malformed", where=where) from exc
    raise InvalidValue("pickle", f"{name} at byte {position}", "ends without STOP", where=where)


class _Machine:
    """The stack machine, with calls and imports recorded instead of done."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _PUT:
            self.memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in _GET:
            stack.append(self.memo[int(argument)])
        elif name not in _NOTHING:
            self._build(name, argument)

    def _build(self, name: str, argument: Any) -> None:
        handler = _HANDLERS.get(name)
        if handler is None:
            raise NotImplementedError("this opcode is not allowed here")
        handler(self, argument)

    def pop_mark(self) -> list[Any]:
        """Everything above the topmost mark, which is removed too."""
        index = len(self.stack) - 1
        while self.stack[index] is not _MARK:
            index -= 1
            if index < 0:
                raise ValueError("no mark on the stack")
        items = self.stack[index + 1 :]
        del self.stack[index:]
        return items

    def tuple_of(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        (target.items if isinstance(target, Opaque) else target).extend(items)

    def update(self, items: list[Any]) -> None:
        target, pairs = self.stack[-1], list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Opaque):
            target.items.extend(pairs)
        else:
            target.update(pairs)

    def name(self, module: Any, attribute: Any) -> None:
        self.stack.append(Opaque(f"{module}.{attribute}"))

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(self._called(function, args))

    def call_with_keywords(self) -> None:
        keywords, args, function = self.stack.pop(), self.stack.pop(), self.stack.pop()
        made = self._called(function, args)
        made.items.extend(keywords.items())
        self.stack.append(made)

    def set_state(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Opaque):
            raise ValueError("state for a plain value")
        target.state = state

    @staticmethod
    def _called(function: Any, args: Any) -> Opaque:
        if not isinstance(function, Opaque) or not isinstance(args, tuple):
            raise ValueError("a call of something that is not a name")
        if function.name in ("copy_reg._reconstructor", "copyreg._reconstructor", "copyreg.__newobj__"):
            return Opaque(args[0].name, args[1:])
        return Opaque(function.name, args)


def _add(machine: _Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    target.items.extend(items) if isinstance(target, Opaque) else target.update(items)


def _drop(items: list[Any]) -> None:
    items.clear()


def _stack_global(machine: _Machine) -> None:
    attribute, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, attribute)


_HANDLERS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_mark())),
    "TUPLE1": lambda m, _: m.tuple_of(1),
    "TUPLE2": lambda m, _: m.tuple_of(2),
    "TUPLE3": lambda m, _: m.tuple_of(3),
    "LIST": lambda m, _: m.stack.append(m.pop_mark()),
    "DICT": lambda m, _: m.stack.append((lambda i: dict(zip(i[::2], i[1::2], strict=True)))(m.pop_mark())),
    "FROZENSET": lambda m, _: m.stack.append(frozenset(m.pop_mark())),
    "APPEND": lambda m, _: m.extend([m.stack.pop()]),
    "APPENDS": lambda m, _: m.extend(m.pop_mark()),
    "SETITEM": lambda m, _: m.update([m.stack.pop(-2), m.stack.pop()]),
    "SETITEMS": lambda m, _: m.update(m.pop_mark()),
    "ADDITEMS": lambda m, _: _add(m),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: _drop(m.pop_mark()),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "GLOBAL": lambda m, argument: m.name(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: _stack_global(m),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "NEWOBJ_EX": lambda m, _: m.call_with_keywords(),
    "BUILD": lambda m, _: m.set_state(),
}
