"""``prism pack``"""

from __future__ import annotations

import time
from pathlib import Path

import click

from prism.cli import output
from prism.config.model_files import model_facts, model_folder
from prism.config.state import DEFAULT_STATE_DIR, StateDir
from prism.config.units import parse_size_bytes
from prism.weights.folders.pack_folder import pack_folder
from prism.weights.store.weight_store import WeightStore


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--state-dir", envvar="PRISM_STATE_DIR", default=DEFAULT_STATE_DIR, show_default=True)
@click.option(
    "--block-size", help="Cut layers into blocks of at most this size, such as 64MiB.  [default: one block each]"
)
@click.option("--copy", is_flag=True, help="Copy the bytes, so that the pack does not need the model's files any more.")
@click.option("--budget", help="Bytes all packs may take on disk; the least recently used leave.  [default: no limit]")
@output.json_option
def command(
    models: tuple[str, ...], state_dir: str, block_size: str | None, copy: bool, budget: str | None, as_json: bool
) -> None:
    """Pack the weights of models (folders or Hugging Face ids) into the store's blocks.

    Every byte is read once and checksummed. The pack is an index: the bytes stay in the model's files, and it is
    refused when these change. The first activation on this machine takes its tensors from the pack, through one
    verified copy in memory; later ones copy the image that the engine keeps of itself."""
    limit = parse_size_bytes(budget, "--budget") if budget else None
    store = WeightStore(StateDir.at(state_dir).store, limit)
    block_bytes = parse_size_bytes(block_size, "--block-size") if block_size else None
    rows: list[dict[str, object]] = []
    for model in models:
        start_s = time.monotonic()
        folder = model_folder(model, Path.cwd())
        if (folder / "config.json").exists():
            model_facts(str(folder), folder)
        with output.progress(f"packing {model}") as report:
            header = pack_folder(store, folder, label=model, block_bytes=block_bytes, copy=copy, on_progress=report)
        rows.append(
            {
                "model": model,
                "fingerprint": header.key.model,
                "blocks": len(header.blocks),
                "bytes": header.data_bytes,
                "refers_to": str(store.refers_to(header.key) or ""),
                "seconds": round(time.monotonic() - start_s, 3),
            }
        )
    if as_json:
        output.print_json(rows)
        return
    columns = ("MODEL", "FINGERPRINT", "BLOCKS>?2", "SIZE>", "SECONDS>?3", "BYTES ARE IN?1")
    cells = (
        [
            str(r["model"]),
            str(r["fingerprint"]),
            str(r["blocks"]),
            output.size(r["bytes"]),
            str(r["seconds"]),
            str(r["refers_to"] or "the pack"),
        ]
        for r in rows
    )
    output.print_table(columns, cells, "nothing packed")
