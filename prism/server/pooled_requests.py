"""What clients ask of models that answer with vectors or scores: OpenAI's embeddings, and the calls for which SGLang,
vLLM, Cohere and Jina have one form."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from prism.server.errors import invalid

MAX_INPUTS: Final = 2048
"""OpenAI's bound on the inputs of one request."""
MAX_LABELS: Final = 1024

_TEXT: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer"}}
Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}),
]
"""A text, token ids, or a list of one of them; checked by :func:`rows_of`."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str
    user: str | None = None


class EmbeddingsRequest(_Request):
    """OpenAI's."""

    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=1 << 20)] | None = None


class ClassifyRequest(_Request):
    """SGLang's and vLLM's."""

    input: Input


class ScoreRequest(_Request):
    """SGLang's: ``query`` and each of ``items`` in one text, or as token ids both."""

    query: Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _IDS]})] = ""
    items: Input
    label_token_ids: list[int] | None = Field(default=None, max_length=MAX_LABELS)
    """Tokens whose probability is asked for; a model that generates needs them."""
    apply_softmax: bool = False
    item_first: bool = False


class TextDocument(BaseModel):
    model_config = ConfigDict(extra="forbid")
    text: str


class RerankRequest(_Request):
    """Cohere's and Jina's."""

    query: str
    documents: list[str | TextDocument]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    instruct: str | None = None
    """For rerankers whose template knows instructions."""

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def rows_of(value: Any, param: str) -> list[str] | list[list[int]]:
    """The inputs in ``value``: texts that are not empty, or lists of token ids. Raises :class:`ApiError` (400)."""
    rows = value if isinstance(value, list) and not (value and _is_id(value[0])) else [value]
    if not rows:
        raise invalid(f"'{param}' is empty.", param)
    check_count(len(rows), param)
    if all(isinstance(row, str) for row in rows):
        for index, row in enumerate(rows):
            if not row.strip():
                raise invalid(f"'{param}' has an empty text (number {index}).", param)
        return rows
    if all(isinstance(row, list) and row and all(map(_is_id, row)) for row in rows):
        return rows
    raise invalid(f"'{param}' must be a text, a list of texts, or token ids (a list, or a list of lists).", param)


def check_count(count: int, param: str) -> None:
    """Raises :class:`ApiError` for more inputs than one request may have."""
    if count > MAX_INPUTS:
        raise invalid(f"'{param}' may have {MAX_INPUTS} entries (got {count}).", param)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
