"""The front door: where it listens, what it takes, who may ask, what it writes down."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from prism.config.sections.base import Section
from prism.config.units import Bytes, Seconds


class ImageConfig(Section, frozen=True, kw_only=True):
    """Images in requests to models that take them."""

    hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts (`images.example.org`, `*.example.org`, with `:PORT` if it is not the usual one) from "
            "which images are fetched for clients, never over private addresses. Default: none; clients send data URLs."
        ),
    ] = ()
    max_bytes: Annotated[Bytes, Meta(description="Largest image, as it is sent or fetched.")] = field(
        name="max_size", default_factory=lambda: Bytes(8 << 20)
    )
    max_pixels: Annotated[int, Meta(ge=1, description="Most pixels of one image.")] = 1 << 24
    max_count: Annotated[int, Meta(ge=0, le=1000, description="Most images of one request; 0: none are taken.")] = 0
    max_prepared_bytes: Annotated[
        Bytes,
        Meta(description="Most that all images of a request may have as the model reads them; it waits in the queue."),
    ] = field(name="max_prepared", default_factory=lambda: Bytes(64 << 20))
    timeout_s: Annotated[Seconds, Meta(description="How long fetching one may take.")] = field(
        name="timeout", default_factory=lambda: Seconds(10.0)
    )


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP front door."""

    host: Annotated[str, Meta(description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")] = 8000
    front_workers: Annotated[int, Meta(ge=1, le=256, description="Front-door processes sharing the port.")] = 1
    redis_url: Annotated[
        str | None,
        Meta(description="A Redis or Valkey to use. Default: an embedded one, started and stopped with the server."),
    ] = None
    max_queue: Annotated[int, Meta(ge=1, description="Waiting requests of all models over which 429 is answered.")] = (
        20_000
    )
    max_body_bytes: Annotated[Bytes, Meta(description="Larger request bodies get 413.")] = field(
        name="max_body", default_factory=lambda: Bytes(32 << 20)
    )
    request_timeout_s: Annotated[
        Seconds | None, Meta(description="A request that has not finished by then ends with an error. Default: never.")
    ] = field(name="request_timeout", default=None)
    sse_keepalive_s: Annotated[
        Seconds,
        Meta(description="A stream that is silent for so long gets an SSE comment line, so that proxies keep it."),
    ] = field(name="sse_keepalive", default_factory=lambda: Seconds(5.0))
    write_timeout_s: Annotated[
        Seconds, Meta(description="A client that takes no byte for so long is cut off and its request cancelled.")
    ] = field(name="write_timeout", default_factory=lambda: Seconds(60.0))
    drain_timeout_s: Annotated[Seconds, Meta(description="How long a stopping server waits for running requests.")] = (
        field(name="drain_timeout", default_factory=lambda: Seconds(30.0))
    )
    cors_origins: Annotated[tuple[str, ...], Meta(description="Origins browsers may call from (`*` for all).")] = ()
    images: Annotated[ImageConfig, Meta(description="Images in requests.")] = field(default_factory=ImageConfig)


class LogConfig(Section, frozen=True, kw_only=True):
    """Logs and the decision log."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="Least level that is logged.")] = (
        "info"
    )
    prompts: Annotated[bool, Meta(description="Log prompts too. Off: never a word of what was said.")] = False
    max_bytes: Annotated[Bytes, Meta(description="A log file is rotated when it reaches this size.")] = field(
        name="max_size", default_factory=lambda: Bytes(64 << 20)
    )
    backups: Annotated[int, Meta(ge=0, le=1000, description="Rotated files kept.")] = 3


class KeyConfig(Section, frozen=True, kw_only=True):
    """An API key. Without any key the API is open, and admin calls need the key in the state directory."""

    name: Annotated[
        str, Meta(min_length=1, max_length=100, description="Shown in logs and metrics instead of the key.")
    ]
    key: Annotated[str, Meta(min_length=8, description="The secret; better `${env:NAME}` than in the file.")]
    admin: Annotated[bool, Meta(description="May use the admin calls.")] = False
    requests_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Requests per minute. Default: unlimited.")
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Prompt and answer tokens per minute. Default: unlimited.")
    ] = None
    models: Annotated[
        tuple[str, ...] | None, Meta(description="Models it may use: names, aliases or shell patterns. Default: all.")
    ] = None
