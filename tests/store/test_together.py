"""Calls of one turn travel together: each has its own answer, whatever becomes of the others."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio as aioredis
import redis.exceptions as errors

from prism.store.embedded import EmbeddedServer
from prism.store.together import Together

pytestmark = pytest.mark.redis
ECHO = "return {KEYS[1], ARGV[1]}"
REFUSE = "return redis.error_reply('ERR ' .. ARGV[1])"


async def test_answers_and_errors_are_each_calls_own(server: EmbeddedServer) -> None:
    async with aioredis.Redis.from_url(server.url) as client:
        await client.script_flush()  # nobody has the scripts: they are given when the server says so
        together, echo, refuse = Together(client), client.register_script(ECHO), client.register_script(REFUSE)
        before = (await client.info("stats"))["total_reads_processed"]
        calls = [together.call(refuse if i % 7 == 3 else echo, [f"k{i}"], [str(i)]) for i in range(70)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        for i, reply in enumerate(found):
            if i % 7 == 3:
                assert isinstance(reply, errors.ResponseError) and str(i) in str(reply)
            else:
                assert reply == [b"k%d" % i, b"%d" % i]
        again = await asyncio.gather(*(together.call(echo, [f"k{i}"], [str(i)]) for i in range(200)))
        assert again == [[b"k%d" % i, b"%d" % i] for i in range(200)]
        reads = (await client.info("stats"))["total_reads_processed"] - before
        assert reads < 200, "the second round was few commands on the wire"


async def test_a_lost_connection_is_everybodys_error(server: EmbeddedServer) -> None:
    client = aioredis.Redis.from_url("unix:///nowhere/at/all.sock")
    together, echo = Together(client), client.register_script(ECHO)
    found = await asyncio.gather(*(together.call(echo, ["k"], [i]) for i in range(5)), return_exceptions=True)
    assert all(isinstance(reply, errors.ConnectionError) for reply in found)
    await client.aclose()


async def test_a_caller_that_goes_away_does_not_disturb_the_others(server: EmbeddedServer) -> None:
    async with aioredis.Redis.from_url(server.url) as client:
        together, echo = Together(client), client.register_script(ECHO)
        tasks = [asyncio.create_task(together.call(echo, ["k"], [str(i)])) for i in range(10)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found.pop(4), asyncio.CancelledError)
        assert found == [[b"k", b"%d" % i] for i in range(10) if i != 4]
