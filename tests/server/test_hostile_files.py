"""Model folders made to do harm, served: no code of theirs runs, no template gets at Python, neighbours go on."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prism.config.catalog import load_catalog
from prism.engine.fake import FakeSpeed
from tests.server.conftest import LETTERS
from tests.server.live import LiveFront
from tests.server.tiny import TEMPLATE, make_model

pytestmark = pytest.mark.hostile

REACHING = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ (messages | attr('append'))(1) }}{{ messages.append(1) }}",
    "{% set x = namespace.__init__.__globals__ %}{{ x }}",
)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[LiveFront, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    make_model(folder / "good")
    names = ["good", "code"]
    code = make_model(folder / "code")
    change(code / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    change(code / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]})
    (code / "evil.py").write_text(f"import os\nos.mkdir({str(folder / 'ran')!r})\n")
    for i, text in enumerate(REACHING):
        names.append(f"reaching-{i}")
        change(make_model(folder / names[-1]) / "tokenizer_config.json", chat_template=text + TEMPLATE)
    listed = ", ".join(f"{{name: {name}, path: {name}}}" for name in names)
    (folder / "catalog.yaml").write_text(f"models: [{listed}]\n")
    speeds = {name: FakeSpeed(vocab=LETTERS) for name in names}
    with LiveFront(load_catalog(folder / "catalog.yaml"), folder, speeds) as live:
        yield live, folder
    shutil.rmtree(folder, ignore_errors=True)


def change(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def chat(live: LiveFront, model: str) -> tuple[int, str]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    answer = live.http.post("/v1/chat/completions", json=body)
    return answer.status_code, answer.text


def test_code_in_a_model_folder_does_not_run(served: tuple[LiveFront, Path]) -> None:
    live, folder = served
    status, text = chat(live, "code")
    assert status in (200, 503), text
    assert not (folder / "ran").exists()
    assert chat(live, "good")[0] == 200


@pytest.mark.parametrize("number", range(len(REACHING)))
def test_templates_do_not_get_at_python(served: tuple[LiveFront, Path], number: int) -> None:
    live, _ = served
    status, text = chat(live, f"reaching-{number}")
    assert status in (200, 400, 503), text
    assert status == 200 or json.loads(text)["error"]["code"]
    for secret in ("root:", "subclasses", "<class", "builtin_function", "__loader__"):
        assert secret not in text
    assert chat(live, "good")[0] == 200
