"""The life of a stream: slow starts, failures after the first byte, clients that leave, clients that do not read."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from prism.core.ids import DeviceId, Generation, ModelName
from prism.core.instances import whole_model
from prism.core.views import InstanceState
from prism.engine.fake import FakeSpeed
from prism.store.values import Replica
from prism.wire import keys
from prism.wire.messages import Failed
from tests.patience import PATIENCE_S, until
from tests.server.conftest import LETTERS
from tests.server.live import ADMIN_KEY, LiveFront

CHAT = "/v1/chat/completions"
LEAVES = httpx.Timeout(PATIENCE_S, read=0.3)
"""A client that leaves soon when nothing comes."""


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


def nothing_left(live: LiveFront) -> bool:
    lengths = live.run(live.store.lengths([keys.device_queue("local/host:0"), keys.INACTIVE_QUEUE]))
    running = sum(handle.load.running for handle in live.node.handles.values())
    return lengths == [0, 0] and not live.front.broker.streams and running == 0 and not live.front.broker.waiting


def place(live: LiveFront, model: str, replicas: list[Replica]) -> None:
    holder = live.run(live.store.controller())
    assert holder is not None
    live.run(live.store.set_placement(ModelName(model), replicas, holder))


def open_id(live: LiveFront, model: str) -> str:
    def found() -> str | None:
        return next((s.id for s in list(live.front.broker.streams.values()) if s.model == model), None)

    return until(found, f"a request for {model} being open") or ""


def gone(request_id: str) -> Failed:
    return Failed(id=request_id, status=503, type="server_error", code="engine_lost", message="gone")


def cancelled(live: LiveFront, model: str) -> float:
    """Requests for it whose client went away, so far. One that leaves may be gone before its request was looked at,
    and then nothing of it is there yet."""
    rows = [row for row in live.http.get("/metrics").text.splitlines() if row.startswith("prism_requests_total{")]
    mine = [row for row in rows if f'model="{model}"' in row and 'outcome="cancelled"' in row]
    return sum(float(row.rpartition(" ")[2]) for row in mine)


@pytest.fixture
def cold(live: LiveFront) -> Any:
    """The model ``cold`` waits; calling the fixture's value brings it up."""
    yield lambda: live._loop.call_soon_threadsafe(live.node.activate, "cold", FakeSpeed(vocab=LETTERS))
    live._loop.call_soon_threadsafe(live.node.handles.pop, "cold", None)
    until(lambda: nothing_left(live), "the queues are empty again")


def test_a_cold_start_is_kept_alive_and_then_answers(live: LiveFront, cold: Callable[[], None]) -> None:
    with live.http.stream("POST", CHAT, json=body("cold", max_tokens=3)) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        comments = [line for line in (next(lines) for _ in range(3)) if line]
        assert comments and all(line.startswith(":") for line in comments)
        cold()
        rest = [line for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]


def test_the_official_client_waits_through_a_cold_start(live: LiveFront, cold: Callable[[], None]) -> None:
    stream = live.client().chat.completions.create(  # type: ignore[call-overload]
        model="cold", messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream=True
    )
    cold()
    assert len("".join(c.choices[0].delta.content or "" for c in stream)) == 3


def test_progress_on_request(live: LiveFront, cold: Callable[[], None]) -> None:
    with live.http.stream("POST", CHAT, json=body("cold", max_tokens=3), headers={"x-prism-progress": "1"}) as answer:
        every = answer.iter_lines()
        lines = (line for line in every if line.startswith(": prism "))
        seen = json.loads(next(lines).removeprefix(": prism "))
        assert (seen["state"], seen["position"], seen["model"]) == ("waiting_for_model", 0, "cold")
        here, state = whole_model([DeviceId("local/host:0")]), InstanceState.LOADING
        loading = Replica(parts=here, state=state, generation=Generation(9), reason="demand")
        place(live, "cold", [loading])
        for line in lines:
            seen = json.loads(line.removeprefix(": prism "))
            if seen["state"] == "loading":
                break
        assert (seen["position"], seen["note"]) == (0, "on local/host:0: demand")
        place(live, "cold", [])
        cold()
        assert [line for line in every if line][-1] == "data: [DONE]"


def test_a_failure_before_the_first_byte_is_an_http_error(live: LiveFront, cold: Callable[[], None]) -> None:
    def fail() -> None:
        failed = Failed(
            id=open_id(live, "cold"), status=429, type="overloaded_error", code="late", message="m", retry_after_s=3
        )
        live.tell(failed)

    thread = threading.Thread(target=fail)
    thread.start()
    answer = live.http.post(CHAT, json=body("cold", stream=False))
    thread.join()
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "late")
    assert (answer.headers["retry-after"], answer.headers["x-should-retry"]) == ("3", "true")


def test_a_failure_after_the_first_byte_is_an_event_and_never_done(live: LiveFront) -> None:
    with live.http.stream("POST", CHAT, json=body("endless", max_tokens=400)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        live.tell(gone(open_id(live, "endless")))
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_lost"
    assert "data: [DONE]" not in rest
    until(lambda: nothing_left(live), "the request was cancelled everywhere")


def test_a_text_stream_fails_the_same_way(live: LiveFront) -> None:
    request = {"model": "endless", "prompt": "abc", "max_tokens": 400, "stream": True}
    with live.http.stream("POST", "/v1/completions", json=request) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.tell(gone(open_id(live, "endless")))
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_lost"
    until(lambda: nothing_left(live), "the request was cancelled everywhere")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["endless", "cold"])
def test_a_client_that_leaves_cancels_everywhere(live: LiveFront, model: str, stream: bool) -> None:
    before = cancelled(live, model)
    with (
        live.connect(LEAVES) as client,
        pytest.raises(httpx.ReadTimeout),
        client.stream("POST", CHAT, json=body(model, stream=stream)) as s,
    ):
        next(s.iter_lines())
        raise httpx.ReadTimeout("enough was read")
    until(lambda: cancelled(live, model) > before, "its end being noted")
    until(lambda: nothing_left(live), "nothing of the request is left")


def test_a_client_that_never_reads_is_cut_off(live: LiveFront) -> None:
    """Its buffers are bounded by the kernel's and the server's; after ``write_timeout`` the request is cancelled."""
    with socket.socket(socket.AF_UNIX) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(live.socket)
        request = json.dumps({"model": "slow", "prompt": "abc", "max_tokens": 400, "n": 100, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: prism\r\ncontent-length: {len(request)}\r\n\r\n"
        client.sendall(head.encode() + request)
        until(lambda: len(live.front.broker.streams) == 100, "it runs")
        until(lambda: nothing_left(live), "it was cancelled")


def test_other_clients_go_on_beside_one_that_does_not_read(live: LiveFront) -> None:
    with live.http.stream("POST", CHAT, json=body("endless", max_tokens=400)) as unread:
        answer = live.http.post(CHAT, json=body("fast", stream=False, max_tokens=3))
        assert answer.status_code == 200
        unread.close()
    until(lambda: nothing_left(live), "the unread one was cancelled")


def test_a_models_own_bound_answers_429(live: LiveFront) -> None:
    with (
        live.http.stream("POST", CHAT, json=body("busy")),
        live.http.stream("POST", CHAT, json=body("busy")),
    ):
        answer = live.http.post(CHAT, json=body("busy"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    until(lambda: nothing_left(live), "they were cancelled")


def test_an_operator_cancels(live: LiveFront) -> None:
    auth = {"authorization": f"Bearer {ADMIN_KEY}"}
    with live.http.stream("POST", CHAT, json=body("endless", max_tokens=400)) as answer:
        lines = answer.iter_lines()
        next(lines)
        request_id = answer.headers["x-request-id"]
        with live.connect() as other:
            assert other.post(f"/admin/requests/{request_id}/cancel", headers=auth).json() == {"ok": True}
            assert other.post("/admin/requests/req_none/cancel", headers=auth).status_code == 404
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "cancelled"
    until(lambda: nothing_left(live), "nothing is left")
