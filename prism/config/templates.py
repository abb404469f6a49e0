"""Whether a text is a chat template: compiled as the tokenizer library (transformers) does, and never run here."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tokenizer library's ``{% generation %}``, which marks what the model said."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own form)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def syntax_error(template: str) -> str | None:
    """What is wrong with ``template``, and in which line; None when nothing is."""
    extensions: list[Any] = [loopcontrols, Generation]
    try:
        ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions).compile(template)
    except TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except RecursionError:
        return "it is nested too deep"
    return None
