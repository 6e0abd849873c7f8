"""A server process: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

import uvicorn
import uvloop

from packhorse.config import EngineConfig, ServerConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.errors import ConfigError, PackError
from packhorse.loading import load_model
from packhorse.server.app import make_app
from packhorse.server.service import ServedModel, Service


def serve(model: str, engine: EngineConfig, server: ServerConfig, announce: Callable[[str], None]) -> None:
    """Serve until a signal ends it. announce(url): told once requests are answered.

    Raises ConfigError when it cannot listen, and what `load_model` raises.
    """
    listener = listen(server)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(model, engine, server, listener, announce))


def listen(settings: ServerConfig) -> socket.socket:
    """A socket that listens at the address of the settings. Raises ConfigError when that cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened to: {error}. Choose another with --host and --port.",
            param="port",
        ) from error


async def _serve(
    name: str, engine: EngineConfig, settings: ServerConfig, listener: socket.socket, announce: Callable[[str], None]
) -> None:
    service = Service(settings)
    server = uvicorn.Server(
        uvicorn.Config(make_app(service), log_config=None, access_log=False, lifespan="off", server_header=False)
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    service.model = await asyncio.to_thread(_load, name, engine, settings)
    service.model.engine.start()
    host, port = listener.getsockname()[:2]
    announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await serving
    await asyncio.to_thread(service.model.engine.close)


def _load(name: str, config: EngineConfig, settings: ServerConfig) -> ServedModel:
    loaded = load_model(name, config)
    if loaded.tokenizer is None:
        raise PackError(f"{loaded.folder} has no tokenizer, and a server needs one. Convert the model with it.")
    manifest = loaded.manifest
    return ServedModel(
        names=settings.served_model_name or (manifest.name,),
        manifest=manifest,
        tokenizer=loaded.tokenizer,
        engine=AsyncEngine(loaded.engine, max_waiting=settings.max_waiting),
        max_model_len=loaded.engine.max_model_len,
        created=int(time.time()),
    )
