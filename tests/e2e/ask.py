"""A client that may run on another (virtual) host: streams one greedy completion and prints each piece as a JSON line,
and last how many tokens of the prompt were found in caches.

``python -m tests.e2e.ask URL MODEL PROMPT TOKENS``
"""

from __future__ import annotations

import json
import sys

import httpx

from tests.patience import PATIENCE_S


def main() -> None:
    url, model, prompt, tokens = sys.argv[1:]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": int(tokens),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    cached = 0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S, verify=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if usage := event.get("usage"):
                    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                text = event["choices"][0]["text"] if event.get("choices") else ""
                print(json.dumps({"text": text, "error": event.get("error")}), flush=True)
    print(json.dumps({"status": reply.status_code, "cached": cached}), flush=True)


if __name__ == "__main__":
    main()
