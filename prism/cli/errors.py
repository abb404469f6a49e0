"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

from enum import IntEnum
from typing import IO, Any

import click


class Exit(IntEnum):
    """Exit codes of every command; documented in ``docs/cli.md``."""

    OK = 0
    FAILED = 1
    """It was understood but refused or not possible, or a check found problems."""
    USAGE = 2
    """The command line itself is wrong."""
    UNREACHABLE = 3
    """No server answers."""
    UNAUTHORIZED = 4
    """The server does not accept the key."""


class CliError(click.ClickException):
    """A message for the person at the terminal, and the exit code."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        return int(self.code)

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"prism: {self.format_message()}", err=True)
