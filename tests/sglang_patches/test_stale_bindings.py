"""What modules hold of a hooked function is found in one look, as SGLang's own search would find it."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from sglang_patches.stale_bindings import StaleBindings


def nothing_searched(original: object, wrapped: object, source: object) -> int:
    raise AssertionError("known already")


def module(monkeypatch: pytest.MonkeyPatch, name: str, **holds: object) -> Any:
    made = types.ModuleType(name)
    vars(made).update(holds)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_every_binding_but_the_sources_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def original() -> None: ...
    def other() -> None: ...

    home = module(monkeypatch, "prism_home", run=original)
    first = module(monkeypatch, "prism_first", run=original, also=original, other=other)
    second = module(monkeypatch, "prism_second", run=original)
    bindings = StaleBindings([original, other], nothing_searched)
    second.run = other  # bound anew since
    assert bindings(original, "wrapped", home) == 2
    assert (home.run, first.run, first.also, first.other, second.run) == (original, "wrapped", "wrapped", other, other)


def test_what_was_not_looked_for_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def search(original: object, wrapped: object, source: object) -> int:
        asked.append(original)
        return 7

    def original() -> None: ...

    bindings = StaleBindings([original], search)
    assert bindings("unknown", "wrapped", None) == 7
    bindings(original, "wrapped", None)
    assert asked == ["unknown"]
    assert bindings(original, "wrapped", None) == 7, "it may be bound anew since"
