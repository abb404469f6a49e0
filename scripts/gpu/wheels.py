"""What a machine with torch, Triton, CuPy and the usual scientific packages lacks to run Prism's engines, and which
parts of it nothing touches on the way from ``import`` to a token of a dense model on Hopper.

Versions come from ``requirements.lock``. Not needed on that way: cutlass, cudnn-frontend, mistral_common, torchao,
torchaudio, timm, kernels, flash_attn, redis, soundfile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Wanted:
    """A distribution of the lock file. ``drop``: patterns (fnmatch) left out; ``strip``: debug symbols too."""

    name: str
    part: str
    drop: tuple[str, ...] = ()
    strip: bool = False


FIRST, SECOND = "A", "B"
"""The stages on memory and the loader need the first part only, those with engines both."""

SMALL: Final = (
    "annotated-types",
    "dill",
    "distro",
    "fastapi",
    "httpx",
    "jiter",
    "jsonschema",
    "jsonschema-specifications",
    "loguru",
    "opentelemetry-api",
    "orjson",
    "partial-json-parser",
    "pybase64",
    "python-multipart",
    "referencing",
    "sniffio",
    "starlette",
    "traitlets",
    "uvicorn",
    "zstandard",
)
"""Imported on the way, less than a MiB each."""

WANTED: Final = (
    Wanted("msgspec", FIRST),
    Wanted("setproctitle", FIRST),
    Wanted("pyzmq", FIRST),
    Wanted("hiredis", FIRST),
    Wanted("redis", FIRST),
    Wanted("sglang", FIRST, drop=("sglang/srt/grpc/*.so", "sglang/multimodal_gen/test/*", "sglang/test/kits/*")),
    Wanted(
        "sglang-kernel",
        FIRST,
        drop=(
            "sgl_kernel/flash_ops*.so",
            "sgl_kernel/infllm_ops*.so",
            "sgl_kernel/flashmla_ops*.so",
            "sgl_kernel/sm100/*",
        ),
        strip=True,
    ),
    Wanted("flashinfer-python", FIRST, drop=("flashinfer/data/*",)),
    Wanted("transformers", SECOND),
    Wanted("xgrammar", SECOND, drop=("xgrammar/lib/*.a",), strip=True),
    Wanted("apache-tvm-ffi", SECOND, strip=True),
    Wanted("torch-memory-saver", SECOND),
    Wanted("torchcodec", SECOND),
    Wanted("pydantic", SECOND),
    Wanted("pydantic-core", SECOND),
    Wanted("openai", SECOND),
    Wanted("quack-kernels", SECOND),
    Wanted("ipython", SECOND),
    Wanted("watchfiles", SECOND),
    Wanted("cuda-tile", SECOND),
    Wanted("rpds-py", SECOND),
    Wanted("helion", SECOND),
    Wanted("compressed-tensors", SECOND),
    Wanted("gguf", SECOND),
    Wanted("cffi", SECOND),
    *(Wanted(name, SECOND) for name in SMALL),
)
