"""A load generator that costs little: raw HTTP/1.1 over kept connections, one prepared request again and again."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One run. Latencies in seconds, sorted."""

    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    failures: int = 0

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.seconds

    def quantile_s(self, q: float) -> float:
        return self.latencies_s[min(len(self.latencies_s) - 1, int(q * len(self.latencies_s)))]


def prepared(port: int, path: str, body: dict[str, object], key: str) -> bytes:
    """The bytes of one POST."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> int:
    """Sends the request and reads its whole response; returns the status."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    lower = head.lower()
    at = lower.find(b"content-length:")
    if at >= 0:
        await reader.readexactly(int(lower[at + 15 : lower.index(b"\r", at)]))
    else:
        await reader.readuntil(b"0\r\n\r\n")
    return status


async def run(port: int, request: bytes, clients: int, seconds: float) -> Outcome:
    """``clients`` connections, each sending as soon as it has its answer."""
    outcome = Outcome(seconds)
    end_s = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while (began_s := time.perf_counter()) < end_s:
            status = await _one(reader, writer, request)
            if status == 200:
                outcome.latencies_s.append(time.perf_counter() - began_s)
            else:
                outcome.failures += 1
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    outcome.latencies_s.sort()
    return outcome
