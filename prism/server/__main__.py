"""The front door with fake engines, for trying it out: ``python -m prism.server CATALOG.yaml``.

Real tokenizers, templates, queues and HTTP; made-up tokens. `prism-serve` starts the real thing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from prism.config.catalog import load_catalog
from prism.config.state import StateDir
from prism.engine import cuda_stub
from prism.engine.boot import prepare_environment
from prism.obs.logs import setup_logging
from prism.server.worker import WorkerConfig, run_worker
from prism.store.embedded import EmbeddedServer


def main() -> None:
    options = _options()
    catalog = load_catalog(options.catalog)
    setup_logging("front-0", options.log_level, prompts=catalog.log.prompts)
    prepare_environment("host")
    cuda_stub.load()
    with tempfile.TemporaryDirectory(prefix="prism-") as scratch:
        state = StateDir.at(options.state_dir or scratch)
        state.create()
        server = EmbeddedServer(state.redis, state.run / "valkey.sock")
        server.start()
        names = ",".join(model.name for model in catalog.models)
        speed = ["--prefill-s", str(options.prefill_s), "--step-s", str(options.step_s)]
        command = [sys.executable, "-m", "prism.engine.fake_node", "--redis-url", server.url, "--models", names, *speed]
        node = subprocess.Popen(command)
        config = WorkerConfig(
            catalog=str(Path(options.catalog).absolute()),
            state_dir=str(state.root),
            redis_url=server.url,
            host=options.host,
            port=options.port,
            log_level=options.log_level,
        )
        try:
            print(f"http://{options.host}:{options.port}/v1  admin key: {state.admin_key()}", flush=True)
            run_worker(config, catalog)
        finally:
            node.terminate()
            node.wait()
            server.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m prism.server", description="The front door with fake engines.")
    parser.add_argument("catalog")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--state-dir", default=os.environ.get("PRISM_STATE_DIR"))
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--prefill-s", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds per token; 0: all at once")
    return parser.parse_args()


if __name__ == "__main__":
    main()
