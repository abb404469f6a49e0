"""What does a model of the catalog cost that nobody uses?

    python -m benchmarks.server.big_catalog [--models 500]

Starts the whole server on two virtual devices, once with 3 models and once with ``models``, and prints side by side:
seconds until it is ready, memory of the front door and the controller, the time of `GET /v1/models`, `GET
/admin/models` and `GET /metrics`, and the first answer of the last model of the catalog. Each catalog entry has a
folder of its own, made of links to one of the demo models (`make demo`).

Last result: see docs/results/server.md.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
DEMOS = ("demo-llama", "demo-qwen3", "demo-stablelm")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=500)
    counts = (3, parser.parse_args().models)
    rows = [measure(count) for count in counts]
    print(f"{'':28}" + "".join(f"{count:>9} models" for count in counts))
    for name in rows[0]:
        print(f"{name:28}" + "".join(f"{row[name]:>16.3f}" for row in rows))


def measure(count: int) -> dict[str, float]:
    """One server's figures, by name."""
    with tempfile.TemporaryDirectory(prefix="prism-") as folder:
        names = make_models(Path(folder), count)
        catalog = {
            "devices": [{"id": f"host:{i}", "memory": "32MiB"} for i in range(2)],
            "models": [{"name": name, "path": f"{folder}/{name}"} for name in names],
        }
        file = Path(folder) / "catalog.yaml"
        file.write_text(json.dumps(catalog))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "prism.cli.main", "serve", str(file), "--port", str(port)]
        began_s = time.monotonic()
        server = subprocess.Popen([*command, "--state-dir", f"{folder}/state"], stdout=subprocess.DEVNULL, cwd=ROOT)
        try:
            return figures(server, f"http://127.0.0.1:{port}", Path(folder), began_s, names[-1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def make_models(folder: Path, count: int) -> list[str]:
    names = [f"model-{i:04}" for i in range(count)]
    for i, name in enumerate(names):
        (folder / name).mkdir()
        for file in (ROOT / "demo-models" / DEMOS[i % 3]).iterdir():
            (folder / name / file.name).symlink_to(file)
    return names


def figures(server: subprocess.Popen[bytes], url: str, folder: Path, began_s: float, last: str) -> dict[str, float]:
    key = folder / "state" / "admin.key"
    found: dict[str, float] = {}
    while not ready(url):
        if server.poll() is not None:
            raise SystemExit("the server ended; are there demo models (make demo)?")
        time.sleep(0.05)
    found["ready after, s"] = time.monotonic() - began_s
    auth = {"authorization": f"Bearer {key.read_text().strip()}"}
    with httpx.Client(base_url=url, headers=auth, timeout=60) as http:
        pids = {p["name"]: p["pid"] for p in running(http)}
        for path in ("/v1/models", "/admin/models", "/metrics"):
            found[f"GET {path}, ms"] = 1000 * best(lambda path=path: http.get(path).raise_for_status())  # type: ignore[misc]
        for name in ("front-0", "controller"):
            found[f"{name}, MiB"] = psutil.Process(pids[name]).memory_full_info().uss / 2**20
        began_s = time.monotonic()
        body = {"model": last, "prompt": "hello", "max_tokens": 1}
        http.post("/v1/completions", json=body).raise_for_status()
        found["first answer of the last, s"] = time.monotonic() - began_s
    return found


def running(http: httpx.Client) -> list[dict[str, Any]]:
    while True:
        processes: list[dict[str, Any]] = http.get("/admin/status").json().get("processes", [])
        if processes:
            return processes
        time.sleep(0.1)


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readiness", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def best(call: Callable[[], object], times: int = 9) -> float:
    """Seconds of the fastest of ``times`` calls."""
    took_s = []
    for _ in range(times):
        began_s = time.perf_counter()
        call()
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


if __name__ == "__main__":
    main()
