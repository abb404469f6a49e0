"""Prism serves many large language models on few GPUs within their latency objectives.

Start with ``ARCHITECTURE.md``: it tells the life of a request, of a weight and of a memory page.
"""

__version__ = "0.1.0"
