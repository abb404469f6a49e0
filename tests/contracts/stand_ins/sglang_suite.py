"""SGLang's tests start their server with ``popen_launch_server``: here it is the Prism server that runs already."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .marks import Marks

URL = os.environ["PRISM_CONTRACTS_URL"]


def running_server(*arguments: Any, **options: Any) -> Any:
    """In place of a process: nobody may kill it, :func:`leave_running` is all that tests do with it."""
    return SimpleNamespace(pid=None, poll=lambda: None)


def leave_running(*arguments: Any, **options: Any) -> None:
    return None


def pytest_configure(config: pytest.Config) -> None:
    import sglang.srt.utils as utils
    import sglang.srt.utils.common as common
    import sglang.test.test_utils as test_utils

    for module in (utils, common, test_utils):
        vars(module)["kill_process_tree"] = leave_running
    vars(test_utils).update(popen_launch_server=running_server, DEFAULT_URL_FOR_TEST=URL)
    rules = json.loads(os.environ["PRISM_CONTRACTS_RULES"])
    config.pluginmanager.register(Marks(rules, Path(os.environ["PRISM_CONTRACTS_RESULTS"])))
