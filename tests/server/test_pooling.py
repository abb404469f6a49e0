"""Models that answer with vectors or scores: the official client, the answers' forms, what is refused and why, and what
happens to an input whose engine, client or queue goes away. The engines are fakes with one vector per input."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from prism.engine.fake_payload import fake_vector
from prism.server.pooled_requests import MAX_INPUTS
from prism.wire import keys
from prism.wire.messages import Finish, ResumeQuery, TokenItem, Tokens, encode
from tests.patience import until
from tests.server.live import LiveFront
from tests.server.test_resume import Agent, agent  # noqa: F401
from tests.server.test_streams import cancelled
from tests.server.tiny import CONTEXT, VOCAB

EMBEDDINGS = "/v1/embeddings"
SLO = "prism_slo_requests_total"


def expected(text: str) -> list[float]:
    return values_of(tuple(text.encode()))


def values_of(ids: tuple[int, ...]) -> list[float]:
    data = raw(ids)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def raw(ids: tuple[int, ...]) -> bytes:
    from prism.engine.sglang_codec import unpack_vector  # imports SGLang, which the front door has set up by now

    return unpack_vector(fake_vector(ids))


def post(live: LiveFront, route: str, **body: Any) -> Any:
    answer = live.http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(live: LiveFront, route: str, **body: Any) -> dict[str, Any]:
    answer = live.http.post(route, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_the_official_client_gets_its_vectors_in_order(live: LiveFront) -> None:
    texts = [f"text {i}" for i in range(100)]
    made = live.client().embeddings.create(model="vectors", input=texts)  # asks for base64
    assert [row.embedding for row in made.data] == [expected(text) for text in texts]
    assert [row.index for row in made.data] == list(range(100))
    assert (made.model, made.usage.prompt_tokens, made.usage.total_tokens) == ("vectors", 690, 690)


def test_floats_base64_and_token_ids_say_the_same(live: LiveFront) -> None:
    plain = post(live, EMBEDDINGS, model="vectors", input="elephant")
    [row] = plain["data"]
    assert (row["object"], row["embedding"]) == ("embedding", expected("elephant"))
    [coded] = post(live, EMBEDDINGS, model="vectors", input=["elephant"], encoding_format="base64")["data"]
    assert base64.b64decode(coded["embedding"]) == raw(tuple(b"elephant"))
    ids = list(b"elephant")
    for tokens in (ids, [ids]):
        assert post(live, EMBEDDINGS, model="vectors", input=tokens) == plain


def test_probabilities_of_labels(live: LiveFront) -> None:
    found = post(live, "/v1/classify", model="labels", input=["a", "b"])
    scores = expected("a")
    assert [row["index"] for row in found["data"]] == [0, 1]
    assert found["data"][0]["label"] == f"LABEL_{scores.index(max(scores))}"
    assert sum(found["data"][0]["probs"]) == pytest.approx(1.0)
    assert found["data"][0]["num_classes"] == len(scores)


def test_documents_by_relevance(live: LiveFront) -> None:
    documents = ["aa", {"text": "zz"}, "mm", "cc"]
    found = post(live, "/v1/rerank", model="pairs", query="q", documents=documents)["results"]
    scores = {row["index"]: row["relevance_score"] for row in found}
    assert [row["relevance_score"] for row in found] == sorted(scores.values(), reverse=True)
    assert scores[1] == expected("qzz")[0]
    assert {row["index"]: row["document"]["text"] for row in found}[1] == "zz"
    best = post(live, "/v1/rerank", model="pairs", query="q", documents=documents, top_n=2, return_documents=False)
    assert best["results"] == [{"index": r["index"], "relevance_score": r["relevance_score"]} for r in found[:2]]


def test_scores_of_a_classifier(live: LiveFront) -> None:
    found = post(live, "/v1/score", model="labels", query="q ", items=["a", "b"])
    assert found["scores"] == [expected("q a"), expected("q b")]
    turned = post(live, "/v1/score", model="labels", query="q", items="a", item_first=True)
    assert turned["scores"] == [expected("aq")]
    ids = post(live, "/v1/score", model="labels", query=[1, 2], items=[[3], [4, 5]])
    assert ids["scores"] == [values_of((1, 2, 3)), values_of((1, 2, 4, 5))]


@pytest.mark.parametrize(
    ("model", "route", "body"),
    [
        ("vectors", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("vectors", "/v1/completions", {"prompt": "hi"}),
        ("labels", "/v1/completions", {"prompt": "hi"}),
        ("pairs", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("fast", EMBEDDINGS, {"input": "hi"}),
        ("vectors", "/v1/rerank", {"query": "q", "documents": ["d"]}),
        ("pairs", "/v1/score", {"query": "q", "items": ["d"]}),
    ],
)
def test_a_model_of_another_kind_is_named_with_the_choices(
    live: LiveFront, model: str, route: str, body: dict[str, Any]
) -> None:
    before = live.node.answered
    error = refused(live, route, model=model, **body)
    assert (error["param"], error["code"]) == ("model", "unsupported_model_kind")
    assert repr(model) in error["message"] and f"not at {route}" in error["message"]
    choice = {EMBEDDINGS: "vectors", "/v1/rerank": "pairs", "/v1/score": "fast"}.get(route, "fast")
    assert repr(choice) in error["message"].partition("Models for")[2]
    assert live.node.answered == before


def test_a_reranker_has_one_label_and_a_generating_one_a_template(live: LiveFront) -> None:
    body = {"query": "q", "documents": ["d"]}
    assert "2 labels" in refused(live, "/v1/rerank", model="labels", **body)["message"]
    assert "no reranker's" in refused(live, "/v1/rerank", model="fast", **body)["message"]


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"input": []}, "input", "is empty"),
        ({"input": ["a", " "]}, "input", "number 1"),
        ({"input": ["a", 1]}, "input", "must be a text"),
        ({"input": [[1], []]}, "input", "must be a text"),
        ({"input": [[1, True]]}, "input", "must be a text"),
        ({"input": {"a": 1}}, "input", "must be a text"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input", f"may have {MAX_INPUTS}"),
        ({"input": [VOCAB]}, "input", "between 0 and"),
        ({"input": ["ok", "x" * CONTEXT]}, "input", f"takes {CONTEXT - 1}"),
        ({"input": [[1] * CONTEXT]}, "input", f"takes {CONTEXT - 1}"),
        ({"input": "a", "dimensions": 4}, "dimensions", "dimensions only"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "stream": True}, "stream", "Unknown field"),
        ({}, "input", "required"),
    ],
)
def test_what_is_wrong_is_named(live: LiveFront, given: dict[str, Any], param: str, words: str) -> None:
    error = refused(live, EMBEDDINGS, model="vectors", **given)
    assert error["param"] == param and words in error["message"]


def test_scores_need_tokens_of_a_model_that_generates(live: LiveFront) -> None:
    assert refused(live, "/v1/score", model="fast", query="q", items=["a"])["param"] == "label_token_ids"
    error = refused(live, "/v1/score", model="fast", query="q", items=["a"], label_token_ids=[VOCAB])
    assert error["param"] == "label_token_ids"
    assert refused(live, "/v1/score", model="labels", query=[1], items=["a"])["param"] == "query"


def test_a_client_that_leaves_cancels_its_inputs(live: LiveFront) -> None:
    before = cancelled(live, "slow-vectors")
    with live.connect(timeout=0.5) as impatient, pytest.raises(Exception, match="timed out"):
        impatient.post(EMBEDDINGS, json={"model": "slow-vectors", "input": ["a", "b", "c"]})
    until(lambda: cancelled(live, "slow-vectors") > before, "its end being noted")
    until(lambda: not live.front.broker.streams and not live.node.handles["slow-vectors"]._runs, "they were cancelled")


def vector_item(rid: str, attempt: int, text: str) -> TokenItem:
    return TokenItem(rid, attempt, 0, [], {"type": "length", "length": 0}, 0, 0.0, fake_vector(tuple(text.encode())))


def test_an_input_is_answered_once_whichever_engine_does_it(live: LiveFront, agent: Agent) -> None:  # noqa: F811
    """The first engine dies with the answer on its way, the second one's answer comes twice."""
    import threading

    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(post(live, EMBEDDINGS, model="cold-vectors", input="right")))
    asking.start()
    until(lambda: live.node._waiting.get("cold-vectors"), "the input in the queue")
    rid = next(s.id for s in list(live.front.broker.streams.values()) if s.model == "cold-vectors")
    again = agent.ask(ResumeQuery(id=rid, reply_to=agent.address))
    assert (again.known, again.attempt, again.token_ids) == (True, 2, [])
    live.tell(Tokens(engine="e", items=[vector_item(rid, 1, "late")]))
    final = encode(Tokens(engine="e", items=[vector_item(rid, 2, "right")]))
    done = agent.ask(Finish(id=rid, reply_to=agent.address, attempt=2, total_tokens=0, final=final))
    assert not done.known or done.complete
    live.tell(Tokens(engine="e", items=[vector_item(rid, 2, "right")]))
    asking.join()
    assert found[0]["data"][0]["embedding"] == expected("right")
    for entry in live.node._waiting.pop("cold-vectors"):
        live.run(live.store.done(entry, live.node.consumer))
    assert live.run(live.store.lengths([keys.INACTIVE_QUEUE])) == [0]


def test_the_objective_for_a_first_token_is_the_one_for_the_answer(live: LiveFront) -> None:
    def counted(model: str, objective: str) -> float:
        rows = live.http.get("/metrics").text.splitlines()
        mine = [row for row in rows if row.startswith(SLO) and f'model="{model}"' in row and f'"{objective}"' in row]
        return sum(float(row.rpartition(" ")[2]) for row in mine)

    asks = {
        "vectors": (EMBEDDINGS, {"input": ["a", "b", "c"]}),
        "labels": ("/v1/classify", {"input": ["a", "b"]}),
        "pairs": ("/v1/rerank", {"query": "q", "documents": ["a", "b", "c", "d"]}),
    }
    for inputs, (model, (route, body)) in zip((3, 2, 4), asks.items(), strict=True):
        before = counted(model, "ttft")
        post(live, route, model=model, **body)
        assert counted(model, "ttft") - before == inputs, "each input is a request of its own"
        assert counted(model, "tpot") == 0, "it generates nothing"


def test_models_say_what_they_answer_with(live: LiveFront) -> None:
    kinds = {model["id"]: model["kind"] for model in live.http.get("/v1/models").json()["data"]}
    assert (kinds["vectors"], kinds["labels"], kinds["pairs"]) == ("embed", "classify", "rerank")
    assert (kinds["fast"], kinds["broken"]) == ("generate", None)
