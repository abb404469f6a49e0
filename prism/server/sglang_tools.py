"""A tool call that the client demands (``tool_choice`` names a tool, or is ``required``) is forced by a grammar: the
name, and arguments by the tool's schema, whether ``strict`` is set or not.

SGLang's own constraint for parsers with a format of their own lets every tool be called whichever was named, and leaves
arguments open unless ``strict``. Its model-native constraints and its JSON fallback are used as they are.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Tool, ToolChoice
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from xgrammar import StructuralTag
from xgrammar.structural_tag import JSONSchemaFormat, TagFormat

from prism.server.errors import ApiError, invalid

NO_PARSER = "no-tool-call-parser"


def demanded(request: ChatCompletionRequest) -> bool:
    """Whether the answer has to be a tool call."""
    return bool(request.tools) and (request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoice))


def check_tools(request: Any, parser: str | None, model: str) -> str | None:
    """Raises :class:`ApiError` (400) for a demanded call that cannot be made or read. Returns a warning for tools whose
    calls would come back as text: the client left the choice to the model, and text is one of its choices."""
    if not isinstance(request, ChatCompletionRequest) or not request.tools or request.tool_choice == "none":
        return None
    if isinstance(request.tool_choice, ToolChoice):
        named, known = request.tool_choice.function.name, [tool.function.name for tool in request.tools]
        if named not in known:
            raise invalid(f"'tool_choice' names {named!r}; 'tools' has {', '.join(map(repr, known))}.", "tool_choice")
    if not demanded(request):
        return None if parser else f"{NO_PARSER}; model={model!a}; calls come back as text"
    if not parser:
        raise ApiError(
            400,
            "unsupported_parameter",
            f"'tool_choice' demands a tool call, and {model!r} has no parser for them: the catalog's"
            " 'tool_call_parser' must be set for it. ('tools' with 'tool_choice': 'auto' are passed to the model.)",
            param="tool_choice",
        )
    for name in ("regex", "ebnf"):
        if getattr(request, name, None):
            raise invalid(f"{name!r} and a demanded tool call ('tool_choice') exclude each other.", name)
    if request.response_format is not None and request.response_format.type != "text":
        raise invalid(
            "'response_format' and a demanded tool call ('tool_choice') exclude each other.", "response_format"
        )
    return None


def constraint(request: ChatCompletionRequest, parser_name: str, tokenizer: Any, thinking: bool) -> Any:
    """``(kind, value)`` for SGLang's sampling parameters of a :func:`demanded` call. Raises :class:`ApiError` when the
    tools contradict each other."""
    named = request.tool_choice.function.name if isinstance(request.tool_choice, ToolChoice) else None
    tools = [_strict(tool) for tool in request.tools or () if named in (None, tool.function.name)]
    parser = FunctionCallParser(tools, parser_name, tokenizer=tokenizer)
    several = bool(request.parallel_tool_calls) and named is None
    found = parser.get_structure_constraint(request.tool_choice, parallel_tool_calls=several, thinking_mode=thinking)
    if found is None:
        raise invalid(
            "The tools' schemas cannot be turned into a grammar: their '$defs' contradict each other.", "tools"
        )
    kind, value = found
    if named is not None and kind == "structural_tag" and hasattr(value, "structures"):
        return kind, _one_call(parser, tools[0])
    return kind, value


def _strict(tool: Tool) -> Tool:
    function = tool.function.model_copy(
        update={"strict": True, "parameters": tool.function.parameters or {"type": "object"}}
    )
    return tool.model_copy(update={"function": function})


def _one_call(parser: FunctionCallParser, tool: Tool) -> StructuralTag:
    """Exactly one call of ``tool`` in the format of the model's parser, and nothing around it."""
    shape = parser.detector.structure_info()(tool.function.name)
    arguments = JSONSchemaFormat(json_schema=tool.function.parameters)
    return StructuralTag(format=TagFormat(begin=shape.begin, content=arguments, end=shape.end))
