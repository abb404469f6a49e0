"""What SGLang's streaming parsers read does not depend on how many tokens arrived together."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.server.live import import_sglang

TEXT = '<tool_call>\n{"name": "note", "arguments": {"ok": true}}\n</tool_call> and more'


def told(cuts: list[int]) -> list[tuple[str, str | None]]:
    """The pieces of :data:`TEXT` when it is there up to each of ``cuts`` in turn, then as a whole."""
    import_sglang()
    from prism.server.sglang_manager import _pieces

    stream: Any = SimpleNamespace(shown=-1, finished=False)
    found = []
    for end in (*cuts, len(TEXT)):
        stream.finished = end == len(TEXT)
        output = {"text": TEXT[:end], "meta_info": {"finish_reason": "stop" if stream.finished else None}}
        found += [(piece["text"], piece["meta_info"]["finish_reason"]) for piece in _pieces(output, stream)]
    return found


@given(st.lists(st.integers(1, len(TEXT) - 1), unique=True).map(sorted))
def test_pieces_are_the_same_however_the_text_arrives(cuts: list[int]) -> None:
    pieces = told(cuts)
    assert pieces == told([])
    assert pieces[0] == ("", None) and pieces[-1] == (TEXT, "stop")
    assert all(len(b[0]) - len(a[0]) <= 4 for a, b in itertools.pairwise(pieces))
