"""Errors of this package, beside :class:`prism.core.errors.InvalidValue`."""

from __future__ import annotations

from collections.abc import Sequence

from prism.core.errors import InvalidValue, PrismError


class CatalogError(PrismError):
    """A catalog cannot be used. ``problems`` has one :class:`InvalidValue` per mistake, in file order."""

    def __init__(self, problems: Sequence[InvalidValue]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[CatalogError], tuple[object, ...]]:
        return type(self), (self.problems,)


class ModelFilesError(PrismError):
    """A model's folder is missing, incomplete or not understood; the message says which file and how to get it."""
