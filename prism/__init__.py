"""Prism serves many large language models on few GPUs within their latency objectives.

Start with ``ARCHITECTURE.md``: it tells the life of a request, of a weight and of a memory page.
"""

import os
from pathlib import Path

__version__ = "0.1.0"

if _folder := os.environ.get("PRISM_COMPILED"):
    from prism.compiled import use_compiled

    use_compiled(Path(_folder).resolve(), Path(__file__).resolve().parents[1])
