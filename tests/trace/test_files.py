"""Both formats: what is written is read, a bad row is named, memory stays constant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.core.errors import InvalidValue
from prism.trace.check import OutOfOrder
from prism.trace.files import open_trace, write_trace
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
from tests.trace.helpers import original, row, saved

ENDINGS = [".parquet", ".jsonl"]
TOKENS = st.none() | st.integers(1, 2**31 - 1)
ROWS = st.lists(
    st.builds(
        TraceRow,
        arrival_s=st.floats(0, 1e7),
        model=st.text(max_size=8).filter(lambda s: s.isprintable()),
        prompt_tokens=TOKENS,
        output_tokens=TOKENS,
        session=st.none() | st.just("s1"),
        prefix_hashes=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
    ),
    max_size=20,
).map(lambda rows: sorted(rows, key=lambda r: r.arrival_s))


@pytest.mark.parametrize("ending", ENDINGS)
@settings(max_examples=30)
@given(rows=ROWS)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, ending: str, rows: list[TraceRow]) -> None:
    path = tmp_path_factory.mktemp("t") / f"trace{ending}"
    info = TraceInfo({"source": "here", "steps": []}, block_tokens=64)
    assert write_trace(path, rows, info) == len(rows)
    trace = open_trace(path)
    assert list(trace.rows()) == rows == list(trace.rows())
    assert trace.count() == len(rows)
    assert trace.info == info


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (row(float("nan")), "arrival_s"),
        (row(float("inf")), "arrival_s"),
        (row(-1.0), "arrival_s"),
        (row(0.5), "arrival_s"),
        (row(2.0, prompt=0), "prompt_tokens"),
        (row(2.0, output=-3), "output_tokens"),
        (row(2.0, output=2**31), "output_tokens"),
    ],
)
def test_writer_names_the_bad_row(tmp_path: Path, ending: str, bad: TraceRow, field: str) -> None:
    path = tmp_path / f"t{ending}"
    with pytest.raises(InvalidValue, match="row 1") as caught:
        write_trace(path, [row(1.0), bad], TraceInfo())
    assert caught.value.key == field
    assert list(tmp_path.iterdir()) == []  # whole or not at all


def parquet_with(path: Path, **columns: list[object]) -> Path:
    data = {"arrival_s": [0.0, 1.0], "model": ["a", "a"], "prompt_tokens": [1, 2], "output_tokens": [1, 2], **columns}
    pq.write_table(pa.table({name: values for name, values in data.items() if values}), path)
    return path


@pytest.mark.parametrize(
    ("columns", "field", "value"),
    [
        ({"prompt_tokens": [1, 0]}, "prompt_tokens", 0),
        ({"prompt_tokens": ["1", "x"]}, "prompt_tokens", "x"),
        ({"output_tokens": [1, 2**40]}, "output_tokens", 2**40),
        ({"model": ["a", None]}, "model", None),
        ({"arrival_s": [0.0, float("nan")]}, "arrival_s", None),
        ({"arrival_s": [1.0, -0.0]}, "arrival_s", 0.0),
    ],
)
def test_parquet_reader_names_the_bad_row(
    tmp_path: Path, columns: dict[str, list[object]], field: str, value: object
) -> None:
    path = parquet_with(tmp_path / "t.parquet", **columns)
    with pytest.raises(InvalidValue, match=r"t\.parquet row 1") as caught:
        list(open_trace(path).rows())
    assert caught.value.key == field
    if value is not None:
        assert caught.value.value == value


def test_parquet_names_a_missing_column(tmp_path: Path) -> None:
    path = parquet_with(tmp_path / "t.parquet", model=[])
    with pytest.raises(InvalidValue, match=r"t\.parquet: model: the column is missing"):
        list(open_trace(path).rows())


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"arrival_s": 1, "model": "a", "prompt_tokens": "9", "output_tokens": 1}', "prompt_tokens"),
        ('{"arrival_s": 1, "model": "a", "prompt_tokens": 9}', "output_tokens"),
        ('{"arrival_s": 1, "model": "a", "prompt_tokens": 9, "output_tokens": 0}', "output_tokens"),
        ('{"arrival_s": 1, "model"', "line"),
    ],
)
def test_jsonl_reader_names_row_line_and_field(tmp_path: Path, line: str, field: str) -> None:
    path = tmp_path / "t.jsonl"
    good = '{"arrival_s": 0, "model": "a", "prompt_tokens": 9, "output_tokens": 1}'
    path.write_text(f'{{"trace": {{}}}}\n{good}\n\n{line}\n')
    with pytest.raises(InvalidValue, match=r"t\.jsonl row 1 \(line 4\)") as caught:
        list(open_trace(path).rows())
    assert caught.value.key == field


def test_out_of_order_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"arrival_s": t, "model": "", "prompt_tokens": 1, "output_tokens": 1}) for t in (1, 0.5)]
    path.write_text("\n".join(lines))
    with pytest.raises(OutOfOrder, match="row 1"):
        list(open_trace(path).rows())


@pytest.mark.parametrize("name", ["t.csv", "t"])
def test_unknown_ending(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue, match=r"choices: \.parquet, \.jsonl"):
        open_trace(tmp_path / name)


@pytest.mark.parametrize("ending", ENDINGS)
def test_missing_file(tmp_path: Path, ending: str) -> None:
    with pytest.raises(InvalidValue, match="nothing"):
        open_trace(tmp_path / f"nothing{ending}")


MEMORY_SCRIPT = """
import resource, sys
from prism.trace.files import open_trace, write_trace
from prism.trace.row import TraceRow
from prism.trace.schema import TraceInfo
path, count = sys.argv[1], int(sys.argv[2])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_trace(path, (TraceRow(i * 0.01, f"m{i % 8}", 1 + i % 300, 5) for i in range(150_000)), TraceInfo())
assert sum(1 for _ in open_trace(path).rows()) == 150_000
before = peak()
write_trace(path, (TraceRow(i * 0.01, f"m{i % 8}", 1 + i % 300, 5) for i in range(count)), TraceInfo())
assert sum(1 for _ in open_trace(path).rows()) == count
print(peak() - before)
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_million_rows_stream_in_constant_memory(tmp_path: Path, ending: str) -> None:
    """Seven times the rows of the first pass may not need more than a few MiB more (a million rows held as objects
    are about 200 MiB)."""
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path / f"t{ending}"), "1000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 * 1024


def test_the_recorded_traces_are_readable() -> None:
    for name, count in (("arena_vtc_27m", 1500), ("arena_prism_e2e_8m", 754), ("azure2023_conv", 19366)):
        trace = open_trace(original(name))
        assert sum(1 for _ in trace.rows()) == trace.count() == count
        assert "source" in trace.info.provenance


def test_bytes_on_disk_do_not_depend_on_the_run(tmp_path: Path) -> None:
    rows = [row(0.0), row(1.0)]
    first, second = saved(tmp_path / "1.parquet", rows), saved(tmp_path / "2.parquet", rows)
    assert first.read_bytes() == second.read_bytes()


def test_a_header_may_be_written_with_spaces(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    line = '{"arrival_s": 1, "model": "a", "prompt_tokens": 1, "output_tokens": null}'
    path.write_text(f'{{ "trace" : {{"source": "x"}} }} \n{line}\n')
    trace = open_trace(path)
    assert trace.info.provenance == {"source": "x"}
    assert list(trace.rows()) == [row(1.0, prompt=1, output=None)]
    path.write_text('{"trace": oops}\n')
    with pytest.raises(InvalidValue, match=r"t\.jsonl"):
        open_trace(path)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.parquet", [row(i / 10, prompt=1 + i % 700) for i in range(5000)])
    data = bytearray(path.read_bytes())
    data[200:600] = bytes(400)
    path.write_bytes(data)
    with pytest.raises(InvalidValue, match=r"t\.parquet"):
        list(open_trace(path).rows())
