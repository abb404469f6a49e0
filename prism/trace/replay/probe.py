"""How many tokens a server makes of our words: asked once per model, before the replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec

from prism.core.errors import InvalidValue, PrismError
from prism.trace.replay.plan import PromptSource
from prism.trace.replay.prompts import PromptMaker
from prism.trace.replay.requests import ENDPOINTS
from prism.trace.row import TraceRow

WORDS: Final = (8, 40)


class ProbeFailed(PrismError):
    """The server did not answer a probe as an OpenAI server does."""


@dataclass(frozen=True, slots=True)
class Prober:
    """Asks one server. ``key`` is its bearer token."""

    url: str
    endpoint: str
    key: str | None
    ignore_eos: bool
    timeout_s: float = 600.0

    def calibrate(self, served: str, source: PromptSource) -> PromptSource:
        """``source`` with the server's own count of tokens: so many for the template, so many per word. Raises
        :class:`ProbeFailed` when the server refuses or does not count."""
        maker = PromptMaker(msgspec.structs.replace(source, fixed=0.0, per_word=1.0), 1, seed=1)
        counts = [self._count(served, maker, words) for words in WORDS]
        per_word = (counts[1] - counts[0]) / (WORDS[1] - WORDS[0])
        if per_word <= 0:
            raise ProbeFailed(f"model {served!r}: the server counts {counts[1]} tokens for {WORDS[1]} words")
        return msgspec.structs.replace(source, fixed=counts[0] - per_word * WORDS[0], per_word=per_word)

    def _count(self, served: str, maker: PromptMaker, words: int) -> int:
        text = maker.prompt(TraceRow(0.0, served, words, 1), words).decode()
        said: dict[str, Any] = (
            {"prompt": text} if self.endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
        )
        body = {"model": served, "max_tokens": 1, "temperature": 0.0, **said}
        if self.ignore_eos:
            body["ignore_eos"] = True
        reply = self._post(body)
        usage = reply.get("usage") or {}
        if not isinstance(usage.get("prompt_tokens"), int):
            raise ProbeFailed(f"model {served!r}: the server's answer has no usage.prompt_tokens; give --tokenizer")
        return int(usage["prompt_tokens"])

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.endpoint not in ENDPOINTS:
            raise InvalidValue("endpoint", self.endpoint, "unknown endpoint", list(ENDPOINTS))
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            reply = httpx.post(base + ENDPOINTS[self.endpoint], json=body, headers=headers, timeout=self.timeout_s)
            found = reply.json()
        except (httpx.HTTPError, ValueError) as exc:
            raise ProbeFailed(f"no OpenAI-compatible server answers at {self.url}: {exc}") from exc
        if reply.status_code != 200:
            hint = "; if it refuses ignore_eos, use --no-ignore-eos" if "ignore_eos" in reply.text else ""
            raise ProbeFailed(f"model {body['model']!r}: HTTP {reply.status_code}: {reply.text[:300]}{hint}")
        return found if isinstance(found, dict) else {}
