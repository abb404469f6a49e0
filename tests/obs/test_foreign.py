"""What other people's code logs keeps the promise of ``log.prompts``."""

from __future__ import annotations

import json
import logging
from io import StringIO
from pathlib import Path

import pytest

from prism.obs.foreign import PROMPTS_ENV, show_prompts, source_of
from prism.obs.log_context import log_context
from prism.obs.logs import setup_logging

REQUEST = "req_" + "0" * 32
SECRET = "the-secret-word"


def logged(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def complain(name: str, text: str) -> None:
    logging.getLogger(name).error(f"Error in parser: {text}")


def test_words_of_requests_are_shown_as_their_source_has_them(tmp_path: Path) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=False)
    with log_context(request_id=REQUEST):
        complain("sglang.srt.function_call.qwen25_detector", SECRET)
        logging.getLogger("xgrammar").warning("bad %s", SECRET)
        logging.getLogger("transformers.tokenization").warning(SECRET)
    text = (tmp_path / "x.jsonl").read_text()
    assert SECRET not in text
    first, second, third = logged(tmp_path / "x.jsonl")
    assert first["msg"] == "the tool parser could not read the model's output (Error in parser: {text})"
    assert (first["level"], first["request_id"]) == ("warning", REQUEST)
    assert second["msg"] == "bad %s"
    assert third["msg"] == "in test_words_of_requests_are_shown_as_their_source_has_them()"


def test_a_library_that_writes_by_itself_is_taken_over(tmp_path: Path) -> None:
    library, written = logging.getLogger("a_library_with_a_handler"), StringIO()
    library.addHandler(logging.StreamHandler(written))
    library.propagate = False
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=False)
    logging.getLogger("a_library_with_a_handler.part").warning(SECRET)
    assert written.getvalue() == ""
    (only,) = logged(tmp_path / "x.jsonl")
    assert only["logger"] == "a_library_with_a_handler.part" and SECRET not in str(only)


def test_prompts_on_shows_the_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMPTS_ENV, "1")
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None)
    complain("sglang.srt.function_call.qwen25_detector", SECRET)
    show_prompts(False)
    complain("sglang.srt.function_call.qwen25_detector", "another-word")
    assert SECRET in (tmp_path / "x.jsonl").read_text()
    assert "another-word" not in (tmp_path / "x.jsonl").read_text()


@pytest.mark.parametrize("prompts", [False, True])
def test_one_line_per_place_and_request(tmp_path: Path, prompts: bool) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=prompts)
    for request in ("a", "b"):
        with log_context(request_id=request):
            for chunk in range(50):
                complain("sglang.srt.function_call.base_format_detector", f"chunk {chunk}")
                complain("sglang.srt.function_call.base_format_detector", f"chunk {chunk}")
    assert [line["request_id"] for line in logged(tmp_path / "x.jsonl")] == ["a", "b"]


def test_an_id_in_the_message_becomes_a_field(tmp_path: Path) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=False)
    logging.getLogger("sglang.srt.managers.schedule_batch").error(f"schema {SECRET}, self.rid='{REQUEST}-000'")
    (line,) = logged(tmp_path / "x.jsonl")
    assert (line["request_id"], line["level"]) == (REQUEST, "info")
    assert str(line["msg"]).startswith("the engine refuses a request") and SECRET not in str(line)


@pytest.mark.parametrize("name", ["sglang.srt.managers.scheduler", "prism.server.completions"])
def test_exceptions_keep_type_and_frames_only(tmp_path: Path, name: str) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=False)
    try:
        raise ValueError(SECRET)
    except ValueError:
        logging.getLogger(name).exception("it failed")
    (line,) = logged(tmp_path / "x.jsonl")
    assert (line["error"], line["msg"]) == ("ValueError", "it failed")
    assert "test_foreign.py" in str(line["traceback"])
    assert SECRET not in str(line)


def test_loggers_that_see_no_request_and_our_own_are_shown_as_they_are(tmp_path: Path) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=False)
    for name in ("sglang.srt.model_loader.loader", "uvicorn.error", "prism.node.agent", "sglang_patches.weights"):
        complain(name, "no such file")
    assert [line["msg"] for line in logged(tmp_path / "x.jsonl")] == ["Error in parser: no such file"] * 4


def test_misleading_warnings_go(tmp_path: Path) -> None:
    setup_logging("x", "info", tmp_path / "x.jsonl", console=None, prompts=True)
    logging.getLogger("sglang.srt.entrypoints.openai.serving_completions").warning(
        "Echo is not compatible with logprobs. To compute ..."
    )
    logging.getLogger("sglang.srt.constrained.xgrammar_backend").error("Hit invalid json_schema: key_string=...")
    assert logged(tmp_path / "x.jsonl") == []


def test_two_handlers_show_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sys

    setup_logging("x", "info", tmp_path / "x.jsonl", console=sys.stderr, prompts=False)
    with log_context(request_id=REQUEST):
        complain("sglang.srt.function_call.base_format_detector", SECRET)
    shown = capsys.readouterr().err
    assert len(logged(tmp_path / "x.jsonl")) == 1 and len(shown.splitlines()) == 1
    assert SECRET not in shown


def test_sources_that_cannot_be_read_have_no_template() -> None:
    assert source_of("/nowhere.py", 3) == ""
