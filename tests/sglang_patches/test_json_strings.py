"""Whatever a schema's strings look like, what xgrammar lets through is JSON that matches the schema."""

from __future__ import annotations

import json
import random
import re
from itertools import islice
from typing import Any

import pytest
import xgrammar
from hypothesis import given
from hypothesis import strategies as st

from sglang_patches.grammar import compile_json
from sglang_patches.json_strings import as_json_text, in_json

STOP = "<stop>"
VOCABULARY = [*map(chr, range(1, 128)), "ä", "模", STOP]
PATTERNS = [
    "a.*",
    "^.{1,5}$",
    "[^b]+",
    r"\S+",
    r"\w+",
    r"\D*",
    r"\W{2}",
    "[ -~]+",
    r'["\\]',
    'a"b\\\\n\n',
    r"[\s,]+",
    r"\s?x\t",
    r"\d{3}-\d{4}",
    r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$",
    "(?:a|b)+c?",
    "(.|\\n)*",
    "[]a]+",
    "[a-]{2}",
    r"[\x00-\x7f]{3}",
    r"[\-\]\\^x]+",
    r"\.\+\/",
    "ä+",
    r"\x23\x2b\#\-",
]


def compiled(schema: dict[str, Any]) -> Any:
    """xgrammar's, for a model whose tokens are characters."""
    info = xgrammar.TokenizerInfo(VOCABULARY, stop_token_ids=[len(VOCABULARY) - 1])
    return xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(json.dumps(schema))


def babble(grammar: Any, seed: int, often: str = "") -> str | None:
    """What a model that knows nothing says under it, but that it likes to end, and the characters ``often``; None: it
    comes to no end."""
    matcher, dice, said = xgrammar.GrammarMatcher(grammar), random.Random(seed), list[str]()
    mask = xgrammar.allocate_token_bitmask(1, len(VOCABULARY))
    for _ in range(100):
        matcher.fill_next_token_bitmask(mask)
        may = [i for i in range(len(VOCABULARY)) if int(mask[0, i // 32]) >> (i % 32) & 1]
        liked = [i for i in may if VOCABULARY[i] in (STOP, '"', *often)]
        token = dice.choice(liked if liked and dice.random() < 0.3 else may)
        assert matcher.accept_token(token)
        if VOCABULARY[token] == STOP:
            return "".join(said)
        said.append(VOCABULARY[token])
    return None


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_said_is_json_and_matches(pattern: str) -> None:
    grammar = compiled(as_json_text({"type": "string", "pattern": pattern}))
    said = list(islice((text for seed in range(200) if (text := babble(grammar, seed, "@.")) is not None), 15))
    assert said
    for text in said:
        assert re.fullmatch(pattern.removeprefix("^").removesuffix("$"), json.loads(text), re.ASCII), text


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("low", "high"), [(0, 3), (2, None), (2, 2), (None, 4)])
def test_bounded_strings_are_json(low: int | None, high: int | None) -> None:
    bounds = {name: value for name, value in (("minLength", low), ("maxLength", high)) if value is not None}
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], **bounds}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    grammar = compiled(as_json_text(schema))
    values = [json.loads(text)["a"] for seed in range(25) if (text := babble(grammar, seed)) is not None]
    strings = [value for value in values if value is not None]
    assert strings and None in values
    assert all((low or 0) <= len(value) <= (99 if high is None else high) for value in strings)


@given(st.data(), st.sampled_from(["^.{1,5}$", r"[^@]+@\w+", "[ -~]{3}", r"\S+", 'a"\\\\']))
def test_values_that_need_no_escape_can_be_said(data: st.DataObject, pattern: str) -> None:
    text = data.draw(st.from_regex(re.compile(pattern, re.ASCII), fullmatch=True))
    wanted = re.fullmatch(
        in_json(pattern).removeprefix("^").removesuffix("$"), json.dumps(text, ensure_ascii=False)[1:-1]
    )
    plain = not set(text) & {'"', "\\", *map(chr, range(0x20))}
    assert wanted or not plain or "\n" in text or "\x7f" <= max(text) <= "\x9f"


def test_only_schemas_of_strings_are_rewritten_wherever_they_are() -> None:
    bounded, rewritten = {"type": "string", "maxLength": 3}, {"type": "string", "pattern": r'^[^"\\\x00-\x1f]{0,3}$'}
    for whole, expected in [
        ({"properties": {"enum": bounded, "maxLength": {"type": "integer"}}}, None),
        ({"$defs": {"default": bounded}, "items": {"anyOf": [bounded, {"type": "null"}]}}, None),
        ({"enum": [{"type": "string", "maxLength": 3}]}, False),
        ({"type": "string", "enum": ["abc"], "maxLength": 3}, False),
        ({"type": "string", "format": "date", "maxLength": 30}, False),
        ({"type": "array", "minLength": 3}, False),
        ({"structures": [{"begin": "<", "schema": bounded, "end": ">"}]}, None),
    ]:
        kept = json.loads(json.dumps(whole))
        found = json.dumps(as_json_text(whole))
        assert whole == kept, "what is given stays"
        assert found == json.dumps(whole if expected is False else json.loads(json.dumps(whole).replace(
            json.dumps(bounded), json.dumps(rewritten))))  # fmt: skip


def test_the_backend_is_told_so() -> None:
    told: list[str] = []
    backend = object()

    def original(self: object, key_string: str) -> str:
        assert self is backend
        told.append(key_string)
        return "grammar"

    assert compile_json(original, backend, '{"type": "string", "pattern": "."}') == "grammar"
    assert json.loads(told[0])["pattern"] == in_json(".") != "."
    for other in ("$$ANY$$", "{", "[" * 5000):
        assert compile_json(original, backend, other) == "grammar" and told[-1] == other


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", r"\p{L}", r"\bword\b", "[a", "\\", "[z-a]", "x" * 5000])
def test_what_is_not_understood_is_left_to_xgrammar(pattern: str) -> None:
    assert in_json(pattern) == pattern
