"""`packhorse serve`: one model over HTTP, with OpenAI's API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packhorse.cli.settings import given, model_named


def serve(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A pack, or what `packhorse convert` takes, converted once. Default: model_path of the settings.",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings. Default: packhorse.toml, if there.")] = None,
) -> None:
    """Serve one model over HTTP with OpenAI's API, until SIGTERM or Ctrl-C.

    Exit code 0: ended after every request was answered; 1: some were not, for want of time; 2: it could not start.
    """
    from packhorse.config import EngineConfig, ServerConfig, load_config, load_server_config
    from packhorse.errors import ConfigError

    try:
        from packhorse.server.process import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"A server needs {error.name}: pip install 'packhorse[serve]'.") from error

    engine = load_config(given(EngineConfig, ctx.obj) | {"model_path": model}, config)
    server = load_server_config(given(ServerConfig, ctx.obj), config)
    code = serve(model_named(engine), engine, server, announce=lambda url: typer.echo(f"Packhorse serves at {url}"))
    raise typer.Exit(code)
