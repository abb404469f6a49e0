"""Where modules hold what hooks replace, found in one look.

Whoever wrote ``from module import function`` holds the function itself, so that SGLang looks through everything that
all modules hold once per hook: 91 times 290 thousand names, a fifth of an engine's boot. Here one look finds the
bindings of all hooks; what it did not look for is left to SGLang's own search.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType

Rebind = Callable[[object, object, object], int]
"""Original, what takes its place and the module or class that has it already; the bindings changed."""


class StaleBindings:
    """The bindings of ``originals`` as they are now. A call takes the place of SGLang's search, once per original."""

    def __init__(self, originals: Iterable[object], search: Rebind) -> None:
        self._originals, self._search = list(originals), search  # held, so that their ids stay theirs
        self._found: dict[int, list[tuple[ModuleType, str]]] = {id(original): [] for original in self._originals}
        for module in [m for m in sys.modules.values() if isinstance(m, ModuleType)]:
            for name, value in list(vars(module).items()):
                if (found := self._found.get(id(value))) is not None:
                    found.append((module, name))

    def __call__(self, original: object, wrapped: object, source: object) -> int:
        found = self._found.pop(id(original), None)
        if found is None:
            return self._search(original, wrapped, source)
        stale = [(m, name) for m, name in found if m is not source and vars(m).get(name) is original]
        for module, name in stale:
            setattr(module, name, wrapped)
        return len(stale)
