"""SGLang by itself on this CPU: ``python -m tests.engine.stock`` reads ``[{"path", "engine", "prompts", "new"}]`` and
prints the greedy answers of each, one request at a time. Models follow each other in forks of one process, so that
SGLang is imported once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from prism.engine import boot, cuda_stub
from prism.engine.sglang_args import COMMON, HOST, stored_dtype

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT_S: Final = 120


def stock_answers(works: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    """The answers, by work and prompt. Fails with SGLang's words."""
    command = [sys.executable, "-m", "tests.engine.stock"]
    limit_s = 120 + LIMIT_S * len(works)
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(works), capture_output=True, text=True, check=False, timeout=limit_s
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_a_fork(work: dict[str, Any]) -> list[list[int]]:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(LIMIT_S)
        os.dup2(2, 1)
        os.write(write, json.dumps(answer(work)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        raise SystemExit(f"SGLang did not answer for {work['path']}")
    found: list[list[int]] = json.loads(data)
    return found


def answer(work: dict[str, Any]) -> list[list[int]]:
    from sglang.benchmark import one_batch
    from sglang.srt.server_args import PortArgs, ServerArgs

    arguments = {**COMMON, **HOST, "model_path": work["path"], "dtype": stored_dtype(Path(work["path"]))}
    arguments |= {"max_total_tokens": 2048, "max_running_requests": 4, **work["engine"]}
    args = ServerArgs(**arguments)
    runner, _ = one_batch.load_model(args, PortArgs.init_new(args), 0, 0)
    return [generate(runner, prompt, work["new"]) for prompt in work["prompts"]]


def generate(runner: Any, prompt: Sequence[int], new: int) -> list[int]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    runner.clear()
    params = SamplingParams(temperature=0, max_new_tokens=new)
    req = Req(rid="0", origin_input_text="", origin_input_ids=array("q", prompt), sampling_params=params)
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.set_extend_range(0, len(prompt))
    ids, _, batch = runner.extend([req])
    found = [int(ids[0])]
    for _ in range(new - 1):
        ids, _ = runner.decode(ids, batch)
        found.append(int(ids[0]))
    return found


def main() -> None:
    works = json.load(sys.stdin)
    boot.prepare_environment("host")
    os.environ |= {"SGLANG_PLUGINS": "none", "PRISM_ENGINE": "0"}
    cuda_stub.load()
    boot.leave_out_gpu_modules()
    with boot.uncollected():
        import sglang.benchmark.one_batch
        import sglang.srt.models.registry  # noqa: F401 (once, for all forks)

    print(json.dumps([in_a_fork(work) for work in works]), flush=True)


if __name__ == "__main__":
    main()
