"""What other people's code logs in our processes, held to our promise: unless the catalog says ``log.prompts``, no log
has a word of a prompt, an answer or a client's schema.

SGLang, xgrammar and tokenizers write such words into their messages. A record of a logger that may see requests is
therefore shown as its source has it (``Error in parse_streaming_increment: {e}``), with the request's id, once per
place and request; exceptions keep their type and frames and lose their message.
"""

from __future__ import annotations

import ast
import linecache
import logging
import os
import re
import threading
import traceback
from collections import OrderedDict
from functools import lru_cache
from typing import Final

from prism.obs.log_context import context_fields

PROMPTS_ENV: Final = "PRISM_LOG_PROMPTS"
"""``1`` in the environment of all processes of a server whose catalog says ``log.prompts``."""

OURS: Final = ("prism", "sglang_patches")
OUR_REQUESTS: Final = ("prism.server",)
"""Ours, and their exceptions may quote what a client sent."""
UNSEEING: Final = (
    "sglang.srt.configs", "sglang.srt.distributed", "sglang.srt.layers", "sglang.srt.model_executor",
    "sglang.srt.model_loader", "sglang.srt.models", "sglang.srt.server_args", "sglang.srt.plugins", "torch",
    "uvicorn", "prometheus_client", "numba", "triton",
)  # fmt: skip
"""Other people's loggers that never see a request: shown as they are."""

REMEMBERED: Final = 4096
_REQUEST_ID: Final = re.compile(r"req_[0-9a-f]{32}")
_CALLS: Final = frozenset({"debug", "info", "warning", "warn", "error", "exception", "critical", "log"})

_DROPPED: Final = (
    ("sglang.srt.entrypoints.openai.serving_completions", "Echo is not compatible with logprobs"),
    ("sglang.srt.constrained", "Hit invalid "),
    ("transformers.tokenization_utils", "Token indices sequence length is longer"),
)
"""Said of what works here, or again by the record that has the request's id."""
_WORDS: Final = (
    ("sglang.srt.function_call", logging.WARNING, "the tool parser could not read the model's output"),
    ("sglang.srt.managers.schedule_batch", logging.INFO, "the engine refuses a request"),
    ("sglang.srt.constrained", logging.WARNING, "a grammar could not be used"),
)
"""Loggers by prefix, the level their records get at most, and what they mean."""


class ForeignFilter(logging.Filter):
    """For a handler. Changes records of other people's loggers in place; several handlers may share one filter."""

    def __init__(self, prompts: bool | None = None) -> None:
        """``prompts``: whether words of requests may be shown; None: what the environment says."""
        super().__init__()
        self.prompts = os.environ.get(PROMPTS_ENV) == "1" if prompts is None else prompts
        self._seen: OrderedDict[tuple[str, int, str], None] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        verdict = record.__dict__.get("prism_shown")
        if verdict is None:
            verdict = record.__dict__["prism_shown"] = self._judge(record)
        return bool(verdict)

    def _judge(self, record: logging.LogRecord) -> bool:
        if _under(record.name, OURS):
            if record.exc_info and not self.prompts and _under(record.name, OUR_REQUESTS):
                _withhold_exception(record)
            return True
        if _under(record.name, UNSEEING):
            return True
        text = record.getMessage()
        if any(record.name.startswith(name) and text.startswith(start) for name, start in _DROPPED):
            return False
        found = _REQUEST_ID.search(text)
        request_id = found.group() if found else _surrounding_id()
        if not self._first(record, request_id):
            return False
        if found:
            record.request_id = request_id
        means = next((w for w in _WORDS if record.name.startswith(w[0])), None)
        if means is not None and record.levelno > means[1]:
            record.levelno, record.levelname = means[1], logging.getLevelName(means[1])
        if not self.prompts:
            _withhold(record, means[2] if means is not None else "")
        return True

    def _first(self, record: logging.LogRecord, request_id: str) -> bool:
        """Whether this place has not spoken of this request. What belongs to no request is always news."""
        if not request_id:
            return True
        key = (record.pathname, record.lineno, request_id)
        with self._lock:
            if key in self._seen:
                return False
            self._seen[key] = None
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        return True


def show_prompts(on: bool) -> None:
    """From now on, in this process."""
    for handler in logging.getLogger().handlers:
        for found in handler.filters:
            if isinstance(found, ForeignFilter):
                found.prompts = on


def _surrounding_id() -> str:
    return str(context_fields().get("request_id", ""))


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _withhold(record: logging.LogRecord, means: str) -> None:
    template = source_of(record.pathname, record.lineno) or f"in {record.funcName}()"
    record.msg = f"{means} ({template})" if means else template
    record.args = None
    _withhold_exception(record)


def _withhold_exception(record: logging.LogRecord) -> None:
    if record.exc_info and record.exc_info[0] is not None:
        record.__dict__["error"] = record.exc_info[0].__name__
        record.__dict__["traceback"] = "".join(traceback.format_tb(record.exc_info[2]))
    record.exc_info = record.exc_text = None


@lru_cache(maxsize=1024)
def source_of(path: str, line: int) -> str:
    """The message of the logging call at ``line`` as its source has it, values as ``{expression}``; "" when it is not a
    literal."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _CALLS:
            continue
        if node.lineno <= line <= (node.end_lineno or node.lineno) and node.args:
            return _literal(node.args[1 if node.func.attr == "log" and len(node.args) > 1 else 0])
    return ""


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp):
        return _literal(node.left) + (_literal(node.right) if isinstance(node.op, ast.Add) else "")
    return ""
