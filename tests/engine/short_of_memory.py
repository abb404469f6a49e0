"""A worker whose device has room for small steps only: the file ``room`` in the pool's folder says for how many
requests and tokens of prompts (JSON: ``{"rows": 2, "tokens": 256}``). A larger step fails as torch does, at its end:
what it was to write is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def main(args: dict[str, Any]) -> None:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from prism.engine import worker

    room, forward = Path(args["run_dir"]) / "room", ModelRunner.forward

    def bounded(self: Any, forward_batch: Any, *more: Any, **named: Any) -> Any:
        result = forward(self, forward_batch, *more, **named)
        if room.exists():
            bound = json.loads(room.read_text())
            tokens = len(forward_batch.input_ids) if forward_batch.forward_mode.is_extend() else 0
            if forward_batch.batch_size > bound["rows"] or tokens > bound["tokens"]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return result

    ModelRunner.forward = bounded  # type: ignore[method-assign]
    worker.main(args)
