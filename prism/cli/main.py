"""``prism``: the root command. A verb is a module with a click command ``command``, imported only when it runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final, NamedTuple

import click

from prism import __version__
from prism.cli.errors import CliError
from prism.core.errors import PrismError


class Verb(NamedTuple):
    """One line of the table."""

    module: str
    section: str
    help: str


VERBS: Final[dict[str, Verb]] = {
    "serve": Verb("prism.cli.serve", "Server", "Serve a catalog (the same as prism-serve)."),
    "node": Verb("prism.cli.node", "Server", "Let a fleet use this machine (the same as prism-node)."),
    "doctor": Verb("prism.cli.doctor", "Server", "Say what is missing on this machine and how to get it."),
    "config": Verb("prism.cli.config", "Server", "Check catalogs, compare two, print their JSON schema."),
    "ls": Verb("prism.cli.ls", "Models", "List the catalog's models and their states."),
    "ps": Verb("prism.cli.ps", "Models", "List the models that are loaded, with memory and load."),
    "show": Verb("prism.cli.show", "Models", "Show everything about one model."),
    "load": Verb("prism.cli.load", "Models", "Load a model now."),
    "unload": Verb("prism.cli.unload", "Models", "Let a model leave its devices."),
    "pin": Verb("prism.cli.pin", "Models", "Keep a model loaded (or stop keeping it)."),
    "plan": Verb("prism.cli.plan", "Operation", "Show what the scheduler would do now, and why."),
    "top": Verb("prism.cli.top", "Operation", "Watch devices and models."),
    "logs": Verb("prism.cli.logs", "Operation", "Read and follow the server's logs and decisions."),
    "drain": Verb("prism.cli.drain", "Operation", "Empty a device (or use it again)."),
    "requests": Verb("prism.cli.requests", "Operation", "List the requests that have not ended."),
    "cancel": Verb("prism.cli.cancel", "Operation", "Cancel a request."),
    "reload": Verb("prism.cli.reload", "Operation", "Apply changes of the catalog file."),
    "replay": Verb("prism.cli.replay", "Measuring", "Send a trace's requests to a server and measure."),
    "trace": Verb("prism.cli.trace", "Measuring", "Convert, generate and describe request traces."),
    "sim": Verb("prism.cli.sim", "Measuring", "Simulate a catalog and a trace."),
    "profile": Verb("prism.cli.profile", "Measuring", "Find what models carry alone, and what memory they leave."),
    "place": Verb("prism.cli.place", "Measuring", "Plan which models of a fleet share a server."),
    "pack": Verb("prism.cli.pack", "Weights and memory", "Pack a model's weights into blocks."),
    "store": Verb("prism.cli.store", "Weights and memory", "Look at the store of packed weights."),
    "mem": Verb("prism.cli.mem", "Weights and memory", "Look at the devices' memory accounts."),
}

UNDOING: Final = {"unpin": "`prism pin MODEL --off`", "undrain": "`prism drain DEVICES --off`"}
"""What undoes a verb is an option of that verb; by the names that one would guess."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, so that ``prism --help`` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        module = import_module(verb.module)
        found: Any = getattr(module, "command", None) or getattr(module, cmd_name)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the nearest verbs for one that does not exist."""
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            from difflib import get_close_matches

            if args[0] in UNDOING:
                ctx.fail(f"no such command {args[0]!r}; it is {UNDOING[args[0]]}")
            near = get_close_matches(args[0], list(VERBS), n=3) or list(VERBS)
            ctx.fail(f"no such command {args[0]!r}; choices: {', '.join(near)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for section in dict.fromkeys(verb.section for verb in VERBS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, verb.help) for name, verb in VERBS.items() if verb.section == section])

    def invoke(self, ctx: click.Context) -> Any:
        """Errors that Prism raises on purpose become a message and exit code 1, never a traceback."""
        try:
            return super().invoke(ctx)
        except PrismError as error:
            raise CliError(str(error)) from error
        except BrokenPipeError:
            ctx.exit(0)  # the reader (`| head`) has had enough


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="prism")
def main() -> None:
    """Serve many language models on few GPUs within their latency objectives.

    Commands that talk to a running server find it through --state-dir, or take --url and --key. Every command has
    --json.
    """


if __name__ == "__main__":
    main()
