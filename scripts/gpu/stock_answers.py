"""What SGLang by itself answers, greedy: ``python -m scripts.gpu.stock_answers`` reads ``{"arguments": {}, "prompts":
[[id]], "new_tokens": N}`` and prints the new tokens of each prompt, one request at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gpu.bench_rig import OUTER
from scripts.gpu.run import Run
from scripts.gpu.stage import ROOT


def ask_stock(
    run: Run, arguments: Mapping[str, Any], prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]] | None:
    """The answers of an engine of its own with these ``ServerArgs``; None, and a fault, if it fails."""
    text = json.dumps({"arguments": dict(arguments), "prompts": list(prompts), "new_tokens": new_tokens})
    command = [sys.executable, "-m", "scripts.gpu.stock_answers"]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, env=OUTER, check=False)
    run.check(done.returncode == 0, f"SGLang by itself ended with {done.returncode}: {done.stderr[-300:]}")
    if done.returncode:
        return None
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main() -> None:
    import sglang

    work = json.load(sys.stdin)
    engine = sglang.Engine(**work["arguments"])
    sampling = {"temperature": 0, "max_new_tokens": work["new_tokens"], "ignore_eos": True}
    try:
        found = [engine.generate(input_ids=ids, sampling_params=sampling)["output_ids"] for ids in work["prompts"]]
        print(json.dumps(found), flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
