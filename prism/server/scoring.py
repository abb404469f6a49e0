"""``/v1/score`` and ``/v1/rerank``, for models of three kinds: cross-encoders read both texts together, classifiers
score their text, and what generates is asked for the probability of some tokens (rerankers: of "yes" and "no")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from sglang.srt.entrypoints.openai import serving_rerank as theirs
from sglang.srt.managers.io_struct import GenerateReqInput

from prism.core.specs import ModelKind
from prism.server.demand import Demand, demand_of
from prism.server.errors import invalid
from prism.server.pooled_requests import RerankRequest, ScoreRequest, check_count, rows_of
from prism.server.pooled_serving import PooledServing, rendered, softmax, usage_of
from prism.server.sglang_manager import Call
from prism.server.sglang_pooling import PooledInputs

Asked: TypeAlias = PooledInputs | GenerateReqInput


class ScoringServing(PooledServing):
    """Hands inputs to the vectors' way or to the generating one, as the model needs."""

    def demand(self, adapted: Asked, exact: bool) -> Demand:
        if isinstance(adapted, PooledInputs):
            return super().demand(adapted, exact)
        found = demand_of(adapted, self.manager.context_len, self.manager.tokenizer if exact else None)
        return Demand(found.prompt_tokens, 0, found.answers, chosen=True)

    async def submit(self, adapted: Asked, call: Call) -> None:
        if isinstance(adapted, PooledInputs):
            await super().submit(adapted, call)
        else:
            await self.manager.submit(adapted, call)

    async def scores(self, adapted: Asked, label_token_ids: Sequence[int], apply_softmax: bool) -> list[list[float]]:
        """For each input the scores of the classifier's labels, or the probabilities of the tokens."""
        if isinstance(adapted, PooledInputs):
            found = await self.vectors(adapted)
            return [(softmax(row) if apply_softmax else row).tolist() for row in found]
        steps = self.manager.generate_request(adapted)
        try:
            results = await anext(steps)
        finally:
            await steps.aclose()  # type: ignore[attr-defined]
        results = results if isinstance(results, list) else [results]
        scored = self.manager._process_single_item_scoring_results(results, list(label_token_ids), apply_softmax)
        return [list(row) for row in scored.scores]


def next_tokens(prompts: list[str] | list[list[int]], label_token_ids: Sequence[int]) -> GenerateReqInput:
    """Asks how probable each of the tokens is right behind each prompt."""
    texts = isinstance(prompts[0], str)
    return GenerateReqInput(
        text=prompts if texts else None,
        input_ids=None if texts else prompts,
        token_ids_logprob=list(label_token_ids),
        return_logprob=True,
        stream=False,
        sampling_params={"max_new_tokens": 0},
    )


class ScoreServing(ScoringServing):
    """``/v1/score``."""

    def convert(self, request: ScoreRequest) -> Asked:
        rows = self._rows(request)
        if self.kind is not ModelKind.GENERATE:
            return PooledInputs(rows, "items")
        if not request.label_token_ids:
            raise invalid(f"{request.model!r} generates text: 'label_token_ids' says what to score.", "label_token_ids")
        self.manager.check_ids(request.label_token_ids, "label_token_ids")
        return next_tokens(rows, request.label_token_ids)

    def _rows(self, request: ScoreRequest) -> list[str] | list[list[int]]:
        items = rows_of(request.items, "items")
        query = request.query
        kind = str if isinstance(items[0], str) else list
        if query not in ("", []) and not isinstance(query, kind):
            raise invalid("'query' and 'items' must both be texts, or both token ids.", "query")
        if kind is list and query:
            rows_of(query, "query")
        first: Any = query or kind()
        joined: Any = [item + first if request.item_first else first + item for item in items]
        rows: list[str] | list[list[int]] = joined
        return rows

    async def answer(self, adapted: Asked, request: ScoreRequest) -> bytes:
        scores = await self.scores(adapted, request.label_token_ids or (), request.apply_softmax)
        return rendered({"object": "scoring", "scores": scores, "model": request.model, "usage": usage_of(adapted)})


class RerankServing(ScoringServing):
    """``/v1/rerank``. Rerankers that generate are known by their chat template, as SGLang knows them."""

    def convert(self, request: RerankRequest) -> Asked:
        documents = request.texts
        check_count(len(documents), "documents")
        if not documents or not all(text.strip() for text in documents):
            raise invalid("'documents' must be texts that are not empty.", "documents")
        if not request.query.strip():
            raise invalid("'query' is empty.", "query")
        if self.kind is ModelKind.GENERATE:
            return self._judged(request, documents)
        if self.kind is ModelKind.CLASSIFY and len(self.labels) != 1:
            raise invalid(
                f"{request.model!r} has {len(self.labels)} labels, and a reranker has one. Its scores: /v1/classify.",
                "model",
                "unsupported_model_kind",
            )
        return PooledInputs([(request.query, text) for text in documents], "documents")

    def _judged(self, request: RerankRequest, documents: list[str]) -> GenerateReqInput:
        template = self.manager.tokenizer.chat_template
        if not isinstance(template, str) or not theirs._is_qwen3_reranker_template(template):
            why = "generates text, and its chat template is no reranker's (one that asks for 'yes' or 'no')"
            raise invalid(f"{request.model!r} {why}.", "model", "unsupported_model_kind")
        prompts = [
            theirs._render_jinja_chat_template(template, query=request.query, document=text, instruct=request.instruct)
            for text in documents
        ]
        return next_tokens(prompts, theirs._get_yes_no_token_ids(self.manager.tokenizer))

    async def answer(self, adapted: Asked, request: RerankRequest) -> bytes:
        if isinstance(adapted, PooledInputs):
            scores = [float(row[0]) for row in await self.vectors(adapted)]
        else:
            pairs = await self.scores(adapted, adapted.token_ids_logprob[0], False)
            scores = [theirs._qwen3_rerank_score(yes, no) for yes, no in pairs]
        call = adapted.prism_call
        assert call is not None
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
        return rendered(
            {
                "id": call.public_id,
                "model": request.model,
                "results": [self._result(request, index, scores[index]) for index in order],
                "usage": usage_of(adapted),
            }
        )

    def _result(self, request: RerankRequest, index: int, score: float) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "relevance_score": score}
        return {**found, "document": {"text": request.texts[index]}} if request.return_documents else found
