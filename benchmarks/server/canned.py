"""The rival's backend: an OpenAI server that answers at once with a canned completion. ``python canned.py PORT``."""

from __future__ import annotations

import json
import sys
from typing import Any

TEXT = "abcdefgh"
_USAGE = {"prompt_tokens": 12, "completion_tokens": 8, "total_tokens": 20}
_BASE = {"id": "chatcmpl-x", "created": 1, "model": "fast"}
_ANSWER = json.dumps(
    {
        **_BASE,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": TEXT}, "finish_reason": "length"}],
        "usage": _USAGE,
    }
).encode()


def _chunk(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({**_BASE, 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


_EVENTS = b"".join(
    [_chunk({"role": "assistant"}), _chunk({"content": TEXT}), _chunk({}, "length"), b"data: [DONE]\n\n"]
)


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    stream = b'"stream":true' in body.replace(b" ", b"")
    kind = b"text/event-stream" if stream else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": _EVENTS if stream else _ANSWER})


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
