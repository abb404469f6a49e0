"""Logs are JSON lines with the request's id, whatever is logged."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from prism.obs.log_context import log_context
from prism.obs.logs import ConsoleFormatter, JsonFormatter, setup_logging


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_fields(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "front.jsonl"
    setup_logging("front-0", "info", file, console=None)
    log = logging.getLogger("prism.test")
    with log_context(request_id="r1", model="a"):
        log.info("done in %d ms", 3, extra={"device": "host:0", "model": "b"})
    log.debug("not shown")
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("it failed")
    first, second = lines(file)
    assert (first["msg"], first["level"], first["process"]) == ("done in 3 ms", "info", "front-0")
    assert (first["request_id"], first["device"], first["model"]) == ("r1", "host:0", "b")
    assert str(first["ts"]).endswith("Z")
    assert "request_id" not in second
    assert second["error"] == "ValueError: no"
    assert "Traceback" in str(second["traceback"])


async def test_context_follows_tasks(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    setup_logging("x", "info", file, console=None)

    async def work(name: str) -> None:
        with log_context(request_id=name):
            await asyncio.sleep(0)
            await asyncio.create_task(asyncio.to_thread(logging.getLogger("prism.x").info, "in %s", name))

    await asyncio.gather(work("a"), work("b"))
    assert {(line["request_id"], line["msg"]) for line in lines(file)} == {("a", "in a"), ("b", "in b")}


def test_called_again_replaces_handlers(tmp_path: Path) -> None:
    setup_logging("one", "info", tmp_path / "one.jsonl", console=None)
    setup_logging("two", "warning", tmp_path / "two.jsonl", console=None)
    logging.getLogger().info("quiet")
    logging.getLogger().warning("loud")
    assert lines(tmp_path / "one.jsonl") == []
    assert [line["process"] for line in lines(tmp_path / "two.jsonl")] == ["two"]


def test_files_are_rotated(tmp_path: Path) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", max_bytes=2000, backups=2, console=None)
    for i in range(100):
        logging.getLogger().info("line %d", i)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.1", "x.jsonl.2"]


def test_console() -> None:
    stream = io.StringIO()
    setup_logging("serve", "info", console=stream)
    logging.getLogger().info("hello")
    assert json.loads(stream.getvalue())["msg"] == "hello", "not a terminal: JSON"
    record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO", "model": "a"})
    assert ConsoleFormatter("serve").format(record).endswith("serve      hello  model=a")


@given(st.text(), st.one_of(st.text(), st.binary(), st.floats(), st.none(), st.sets(st.integers()), st.just(object())))
def test_any_record_is_one_line_of_json(message: str, value: object) -> None:
    record = logging.makeLogRecord({"msg": message.replace("%", "%%"), "args": (), "value": value})
    line = JsonFormatter("x").format(record)
    assert "\n" not in line
    assert "msg" in json.loads(line)
