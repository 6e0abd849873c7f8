"""`packhorse`: one verb a file. Importing this stays cheap; each verb imports what it needs when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from packhorse import __version__
from packhorse.cli.convert import convert
from packhorse.cli.lengths import lengths
from packhorse.cli.run import run
from packhorse.cli.serve import serve
from packhorse.cli.settings import EngineCommand, ServerCommand
from packhorse.errors import PackhorseError


class _Verbs(TyperGroup):
    """Every verb ends the same way: an expected error is one line and its exit code, never a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PackhorseError as error:
            typer.echo(f"error: {error.message}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("\nInterrupted.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Verbs,
    name="packhorse",
    help="Batch inference for language models: convert a model once, run files of requests through it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("convert")(convert)
app.command("run", cls=EngineCommand)(run)
app.command("serve", cls=ServerCommand)(serve)
app.command("lengths")(lengths)


@app.command("inspect")
def inspect(pack: Annotated[Path, typer.Argument(help="The folder of a pack.")]) -> None:
    """Show what a pack holds: the model, its sizes, its parity with the source."""
    from packhorse.cli.inspect import show_manifest
    from packhorse.pack.manifest import load_manifest

    show_manifest(load_manifest(pack))


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(f"packhorse {__version__} (Python {sys.version.split()[0]})")


def main() -> None:
    """The console script."""
    app()
