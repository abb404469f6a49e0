"""``/metrics`` of a machine without a front door."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import free_port

SCRIPT = """
import os, sys, urllib.request
from pathlib import Path
from prism.obs import names
from prism.obs.metrics import Metrics, expose, prepare_directory
os.environ.update(prepare_directory(Path(sys.argv[1])))
metrics = Metrics()
stop = expose("127.0.0.1", int(sys.argv[2]))
metrics.set(names.INFO, 1, version="a test")
text = urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[2]}/metrics").read().decode()
stop()
print(text)
"""


def test_values_are_read_live(tmp_path: Path) -> None:

    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "m"), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'prism_info{version="a test"} 1.0' in done.stdout
