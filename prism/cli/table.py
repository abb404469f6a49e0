"""Tables that fit the terminal: words are never broken to make room, what matters less is left out and said to be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

GAP: Final = 2
"""Blank cells between two columns."""
LEAST_PROSE: Final = 16
"""Narrowest column of prose: narrower, its lines would be single words."""
_NAME: Final = re.compile(r"(.*?)(~?)(>?)(?:\?(\d+))?\Z", re.DOTALL)


class Column(NamedTuple):
    """One column as a verb names it: ``NAME``, then ``~`` for prose that may be wrapped, ``>`` for numbers (aligned to
    the right), ``?1``, ``?2``... for what may be left out of a table that is too wide, ``?1`` first."""

    title: str
    prose: bool
    right: bool
    rank: int | None

    @classmethod
    def of(cls, name: str) -> Column:
        found = _NAME.match(name)
        assert found is not None
        title, prose, right, rank = found.groups()
        return cls(title, bool(prose), bool(right), None if rank is None else int(rank))


def fitted(names: Sequence[str], rows: Iterable[Sequence[str]], width: int, title: str | None = None) -> Table:
    """A plain table of ``rows`` for a screen of ``width`` cells; ``names`` as in :class:`Column`. When everything else
    was left out and it is still too wide, the widest columns are folded."""
    columns, cells = [Column.of(name) for name in names], [list(row) for row in rows]
    widths = [max(map(_width, [column.title, *(row[i] for row in cells)])) for i, column in enumerate(columns)]
    shown = _shown(columns, widths, width)
    made = Table(box=None, title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False)
    fits = _least(columns, widths, shown) <= width
    for i in shown:
        fixed = widths[i] if fits and not columns[i].prose else None
        justify = "right" if columns[i].right else "left"
        made.add_column(columns[i].title, justify=justify, overflow="fold", width=fixed)  # type: ignore[arg-type]
    for row in cells:
        made.add_row(*(row[i] for i in shown))
    if hidden := [column.title for i, column in enumerate(columns) if i not in shown]:
        made.caption = Text(f"(left out for want of width: {', '.join(hidden)}; --json has all)", style="dim")
        made.caption_justify = "left"
    return made


def _shown(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Indices of the columns that are kept."""
    shown = list(range(len(columns)))
    for i in sorted((i for i in shown if columns[i].rank is not None), key=lambda i: columns[i].rank or 0):
        if _least(columns, widths, shown) <= width:
            break
        shown.remove(i)
    return shown


def _least(columns: Sequence[Column], widths: Sequence[int], shown: Sequence[int]) -> int:
    """Narrowest width at which no word of a column without prose is broken."""
    needed = [min(widths[i], LEAST_PROSE) if columns[i].prose else widths[i] for i in shown]
    return sum(needed) + GAP * (len(shown) - 1)


def _width(text: str) -> int:
    """Cells of the longest line, marks such as ``[red]`` not counted."""
    return max(cell_len(line) for line in Text.from_markup(text).plain.split("\n"))
