"""The tests that SGLang carries for whoever mixes them in (``sglang.test.kits``), and those of its tool-call runner."""

from __future__ import annotations

import os
import unittest
from typing import Any

import openai
import pytest
from sglang.test import tool_call_test_runner
from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
from sglang.test.kits.matched_stop_kit import MatchedStopMixin

MODEL = "demo-qwen3"


class Server(unittest.TestCase):
    """What the mixins read."""

    base_url = os.environ["PRISM_CONTRACTS_URL"]
    model = served_model_name = MODEL


class TestBasicAPIContract(Server, BasicAPIContractMixin):  # type: ignore[misc]
    pass


class TestMatchedStop(Server, MatchedStopMixin):  # type: ignore[misc]
    pass


class TestJSONConstrained(Server, JSONConstrainedMixin):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("case", tool_call_test_runner._TESTS, ids=lambda case: case[0].replace(" ", "_"))
def test_tool_call(case: tuple[str, Any, str]) -> None:
    case[1](openai.OpenAI(base_url=f"{Server.base_url}/v1", api_key="any", max_retries=0), MODEL)
