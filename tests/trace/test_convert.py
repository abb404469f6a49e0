"""Converters: each original's own quirks, bad rows named, and a pickle that is never run."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prism.core.errors import InvalidValue
from prism.trace.convert import CONVERTERS, ConvertOptions, convert
from prism.trace.convert.base import in_order
from prism.trace.convert.json_array import json_array
from prism.trace.convert.pickle_values import Opaque, read_pickle_values
from prism.trace.files import open_trace, write_trace
from prism.trace.row import TraceRow
from tests.trace.helpers import row

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"


def converted(kind: str, path: Path, text: str | bytes, **options: Any) -> tuple[list[TraceRow], dict[str, int]]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    rows, info, tally = convert(kind, path, ConvertOptions(**options))
    listed = list(rows)
    write_trace(path.with_suffix(".parquet"), listed, info)
    assert list(open_trace(path.with_suffix(".parquet")).rows()) == listed
    return listed, tally.dropped


def test_azure_2023(tmp_path: Path) -> None:
    lines = ("2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")
    text = "\r\n".join((AZURE, *lines, ""))
    rows, dropped = converted("azure2023", tmp_path / "a.csv", text, model="conv")
    assert rows == [TraceRow(0.0, "conv", 374, 44), TraceRow(4.314579, "conv", 396, 109)]
    assert dropped == {}


def test_azure_2024_has_zones_and_whole_seconds(tmp_path: Path) -> None:
    lines = ("00:00:00.009930+00:00,10,2", "00:00:01+00:00,11,0", "00:00:02+00:00,12,1")
    text = "\n".join((AZURE, *(f"2024-05-10 {line}" for line in lines)))
    rows, dropped = converted("azure2024", tmp_path / "a.csv", text)
    assert [r.arrival_s for r in rows] == [0.0, 1.99007]
    assert dropped == {"no tokens": 1}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("yesterday,1,2", "TIMESTAMP"),
        ("2023-11-16 18:15:46,x,2", "ContextTokens"),
        ("2023-11-16 18:15:46,1", "GeneratedTokens"),
    ],
)
def test_bad_azure_row_is_named(tmp_path: Path, line: str, field: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:40,1,1\n{line}\n"
    with pytest.raises(InvalidValue, match=r"a\.csv row 1 \(line 3\)") as caught:
        converted("azure2023", tmp_path / "a.csv", text)
    assert caught.value.key == field


def test_missing_column_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="GeneratedTokens: the column is missing"):
        converted("azure2023", tmp_path / "a.csv", "TIMESTAMP,ContextTokens\n")


def test_burstgpt_leaves_out_failures(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,s1,1.5,ChatGPT,472,18,490,Conversation log\n45,s1,2,ChatGPT,1087,0,1087,Conversation log\n"
        "118,s2,2,GPT-4,417,276,693,API log\n"
    )
    rows, dropped = converted("burstgpt", tmp_path / "b.csv", text)
    assert rows == [TraceRow(0.0, "ChatGPT", 472, 18, "s1"), TraceRow(113.0, "GPT-4", 417, 276, "s2")]
    assert dropped == {"failed request": 1}


def test_mooncake_keeps_prefix_hashes(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 6000, "input_length": 700, "output_length": 6, "hash_ids": [0, 2]},
    ]
    path = tmp_path / "m.jsonl.txt"
    rows, _ = converted("mooncake", path, "\n".join(map(json.dumps, lines)), model="kimi")
    assert rows == [
        TraceRow(0.0, "kimi", 600, 5, None, (0, 1)),
        TraceRow(3.0, "kimi", 700, 6, None, (0, 2)),
    ]
    assert convert("mooncake", path, ConvertOptions())[1].block_tokens == 512


def test_bad_mooncake_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"row 0 \(line 1\)") as caught:
        converted("mooncake", tmp_path / "m", '{"timestamp": 1, "input_length": "x", "output_length": 1}')
    assert caught.value.key == "input_length"


CONVERSATIONS = [
    {"id": "1", "conversations": [{"from": "human", "value": "a" * 400}, {"from": "gpt", "value": "b" * 80},
                                  {"from": "human", "value": "c" * 40}, {"from": "gpt", "value": "d" * 40}]},
    {"id": "2", "conversations": [{"from": "system", "value": "x"}, {"from": "gpt", "value": "y"}]},
    {"id": "3", "conversations": [{"from": "human", "value": "e" * 8}, {"from": "gpt", "value": "f"}]},
]  # fmt: skip


def test_sharegpt_turns_share_their_history(tmp_path: Path) -> None:
    rows, dropped = converted(
        "sharegpt", tmp_path / "s.json", json.dumps(CONVERSATIONS), rate_rps=0.001, chars_per_token=4.0, model="m"
    )
    first = [r for r in rows if r.session == "s0"]
    assert [(r.prompt_tokens, r.output_tokens) for r in first] == [(100, 20), (130, 10)]
    assert first[0].prefix_hashes == first[1].prefix_hashes[:2]
    assert dropped == {"no question with an answer": 1}
    assert [r.arrival_s for r in rows] == sorted(r.arrival_s for r in rows)


def test_sharegpt_needs_a_rate_and_a_way_to_count(tmp_path: Path) -> None:
    for options, key in (({"chars_per_token": 4.0}, "rate_rps"), ({"rate_rps": 1.0}, "tokenizer")):
        with pytest.raises(InvalidValue) as caught:
            converted("sharegpt", tmp_path / "s.json", json.dumps(CONVERSATIONS), **options)
        assert caught.value.key == key


@given(
    st.lists(
        st.recursive(st.none() | st.integers() | st.text(), lambda s: st.lists(s) | st.dictionaries(st.text(), s)),
        max_size=5,
    ),
    st.integers(0, 3),
)
def test_json_array_is_read_piece_by_piece(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], indent: int
) -> None:
    path = tmp_path_factory.mktemp("j") / "a.json"
    path.write_text(json.dumps(values, indent=indent or None), encoding="utf-8")
    assert list(json_array(path)) == values


def test_a_json_array_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[1, {"a": ')
    with pytest.raises(InvalidValue, match="row 1"):
        list(json_array(path))


# --- the Arena pickle -----------------------------------------------------------------------------------------------


@pytest.fixture
def request_class(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class in a module that the reader could not import."""
    module = types.ModuleType("slora_trace")
    request = type("Request", (), {"__module__": "slora_trace"})
    module.Request = request  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slora_trace", module)
    return request


def make(cls: type, **attributes: Any) -> Any:
    made = cls()
    made.__dict__.update(attributes)
    return made


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arena_pickle_of_any_protocol(tmp_path: Path, request_class: type, protocol: int) -> None:
    requests = [
        make(request_class, req_id=i, model_dir="base", adapter_dir=f"dir/rank-8-{i}", prompt="Hello " * i,
             prompt_len=i + 1, output_len=np.int64(7), req_time=np.float64(2.5 - i))
        for i in range(3)
    ]  # fmt: skip
    rows, _ = converted("arena", tmp_path / "r.pkl", pickle.dumps((["rank-8-0"], requests), protocol=protocol))
    assert [(r.arrival_s, r.model, r.prompt_tokens, r.output_tokens) for r in rows] == [
        (0.0, "rank-8-2", 3, 7),
        (1.0, "rank-8-1", 2, 7),
        (2.0, "rank-8-0", 1, 7),
    ]


class Boom:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "was-run"
    data = pickle.dumps([Boom(mark)], protocol=protocol)
    with pytest.raises(InvalidValue, match="holds no object with"):
        converted("arena", tmp_path / "r.pkl", data)
    assert not mark.exists()
    pickle.loads(data)  # noqa: S301 - the attack is real: unpickling does run it
    assert mark.exists()


def test_hostile_opcodes_are_refused(tmp_path: Path) -> None:
    for data, what in (
        (b"Pwhatever\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"cos\nsystem\n(S'ls'\no.", "OBJ"),
        (b"}", "EMPTY_DICT"),
        (b"0.", "POP"),
    ):
        path = tmp_path / "p.pkl"
        path.write_bytes(data)
        with path.open("rb") as file, pytest.raises(InvalidValue, match=what):
            read_pickle_values(file, str(path))


def test_shared_nested_lists_do_not_explode(tmp_path: Path) -> None:
    bomb: list[Any] = []
    for _ in range(200):
        bomb = [bomb, bomb]
    with pytest.raises(InvalidValue, match="holds no object"):
        converted("arena", tmp_path / "r.pkl", pickle.dumps(bomb))


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda s: st.lists(s) | st.dictionaries(st.text(), s) | st.tuples(s, s) | st.sets(st.integers()),
)


@given(PLAIN, st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_read_as_pickle_reads_them(
    tmp_path_factory: pytest.TempPathFactory, value: Any, protocol: int
) -> None:
    path = tmp_path_factory.mktemp("p") / "v.pkl"
    path.write_bytes(pickle.dumps(value, protocol=protocol))
    with path.open("rb") as file:
        found = read_pickle_values(file, str(path))
    assert found == value or _calls(value)


def _calls(value: Any) -> bool:
    """Protocol 3 makes sets by a call, which is recorded as such."""
    return (
        isinstance(value, set | frozenset)
        or (isinstance(value, list | tuple) and any(map(_calls, value)))
        or (isinstance(value, dict) and any(map(_calls, value.values())))
    )


@given(st.binary(max_size=200))
@example(b"\x96" + (1 << 60).to_bytes(8, "little"))  # a byte array longer than any memory
def test_any_bytes_are_a_value_or_a_named_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("p") / "v.pkl"
    path.write_bytes(data)
    with path.open("rb") as file:
        try:
            read_pickle_values(file, "v.pkl")
        except InvalidValue as error:
            assert error.where == "v.pkl"


def test_names_are_recorded_not_imported(tmp_path: Path) -> None:
    path = tmp_path / "v.pkl"
    path.write_bytes(pickle.dumps(subprocess.Popen))
    with path.open("rb") as file:
        found = read_pickle_values(file, "v.pkl")
    assert isinstance(found, Opaque)
    assert found.name == "subprocess.Popen"


def test_reordering_repairs_what_is_near() -> None:
    times = [3.0, 1.0, 2.0, 6.0, 5.0]
    assert [r.arrival_s for r in in_order([row(t) for t in times], window=3)] == sorted(times)


def test_unknown_format_and_missing_source(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="choices: azure2023"):
        convert("azure", tmp_path / "x", ConvertOptions())
    for kind in CONVERTERS:
        with pytest.raises(InvalidValue, match="is no file"):
            convert(kind, tmp_path / "x", ConvertOptions())


@pytest.mark.parametrize(
    ("kind", "text", "field"),
    [
        ("azure2023", f"{AZURE}\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47,5.5,5", "ContextTokens"),
        ("azure2023", f"{AZURE}\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47,5,-1", "GeneratedTokens"),
        ("azure2023", f"{AZURE}\n2023-11-16 18:15:46,5,5\n2023-11-16 18:15:47,5", "GeneratedTokens"),
        ("burstgpt", "Timestamp,Model,Request tokens,Response tokens\n1,a,5,5\nnan,a,5,5", "Timestamp"),
        ("burstgpt", "Timestamp,Model,Request tokens,Response tokens\n1,a,5,5\n2,a,inf,5", "Request tokens"),
        ("mooncake", '{"timestamp":0,"input_length":5,"output_length":5}\n{"timestamp":1}', "input_length"),
        ("sharegpt", '[{"conversations":[]},{"conversations":["hello"]}]', "conversations"),
        ("sharegpt", '[{"conversations":[]},{"conversations":[{"from":"human","value":null}]}]', "value"),
    ],
)  # fmt: skip
def test_a_bad_row_names_file_row_and_field(tmp_path: Path, kind: str, text: str, field: str) -> None:
    path = tmp_path / "original"
    path.write_text(text)
    rows, _, _ = convert(kind, path, ConvertOptions(rate_rps=1.0, chars_per_token=4.0))
    with pytest.raises(InvalidValue) as raised:
        list(rows)
    for part in (str(path), "row 1", field):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "start"),
    [("azure2023", f"{AZURE}\n2023-11-16 18:15:46,5,5\n".encode()), ("sharegpt", b'[{"conversations":[]},')],
)
def test_bytes_that_are_no_text_are_said(tmp_path: Path, kind: str, start: bytes) -> None:
    path = tmp_path / "original"
    path.write_bytes(start + b"\xff\xfe")
    rows, _, _ = convert(kind, path, ConvertOptions(rate_rps=1.0, chars_per_token=4.0))
    with pytest.raises(InvalidValue, match="cannot be read"):
        list(rows)


@pytest.mark.parametrize("name", ["rate_rps", "cv", "think_s", "chars_per_token"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_sharegpt_options_must_be_positive(tmp_path: Path, name: str, value: float) -> None:
    (tmp_path / "s.json").write_text("[]")
    options = ConvertOptions(**{"rate_rps": 1.0, "chars_per_token": 4.0, name: value})
    with pytest.raises(InvalidValue, match=name):
        list(convert("sharegpt", tmp_path / "s.json", options)[0])


def test_a_file_that_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("[]")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidValue, match="tokenizer"):
        list(convert("sharegpt", tmp_path / "s.json", ConvertOptions(rate_rps=1.0, tokenizer=tmp_path))[0])


class Request:
    """Pickled by the test below as the artifacts' requests are."""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, 2.5, 0, "5", True])
def test_a_bad_length_in_a_pickle_names_row_and_field(tmp_path: Path, value: object) -> None:
    requests = [Request(), Request()]
    for request in requests:
        request.__dict__.update(req_time=0.0, adapter_dir="a", prompt_len=5, output_len=5)
    requests[1].__dict__["output_len"] = value
    path = tmp_path / "real_trace.pkl"
    path.write_bytes(pickle.dumps(requests))
    with pytest.raises(InvalidValue) as raised:
        list(convert("arena", path, ConvertOptions())[0])
    for part in (str(path), "row 1", "output_len"):
        assert part in str(raised.value)


def test_what_is_no_request_in_a_pickle_is_counted(tmp_path: Path) -> None:
    request = Request()
    request.__dict__.update(req_time=0.0, adapter_dir="a", prompt_len=5, output_len=5)
    path = tmp_path / "real_trace.pkl"
    path.write_bytes(pickle.dumps([request, Path("x"), "text"]))
    rows, _, tally = convert("arena", path, ConvertOptions())
    assert [r.model for r in rows] == ["a"]
    assert tally.dropped == {"no request": 2}
