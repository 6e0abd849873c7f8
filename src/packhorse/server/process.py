"""A server process: listen, load, serve, drain, end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import uvicorn
import uvloop

from packhorse.config import EngineConfig, ServerConfig
from packhorse.engine.async_engine import AsyncEngine
from packhorse.errors import ConfigError, PackError
from packhorse.loading import load_model, warm_up
from packhorse.server.app import make_app
from packhorse.server.keys import keys_of
from packhorse.server.log import log, log_to_stderr
from packhorse.server.metrics import Metrics
from packhorse.server.service import ServedModel, Service

BACKLOG = 2048
"""Connections that the kernel keeps while the event loop is busy."""

STUCK_CLIENT_SECONDS = 60
"""How long a client may take nothing of what was sent to it until the kernel ends its connection."""

FLUSH_SECONDS = 5
"""What answers have to reach their clients after the engine has ended."""

HANGING_STEP_SECONDS = 10
"""What a step under way has to end when nothing else is left to wait for."""

LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(model: str, engine: EngineConfig, settings: ServerConfig, announce: Callable[[str], None]) -> int:
    """Serve until a signal ends it; the exit code: 0 when every request was answered, else 1.

    announce(url): told once requests are answered. Raises ConfigError when it cannot listen or has no readable keys,
    and what `load_model` raises.
    """
    log_to_stderr()
    listener = listen(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(lambda: load(model, engine, settings), settings, listener, announce))


def listen(settings: ServerConfig) -> socket.socket:
    """A socket that listens at the address of the settings. Raises ConfigError when that cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{settings.host}:{settings.port} cannot be listened to: {error}. Choose another with --host and --port.",
            param="port",
        ) from error
    # Connections inherit it. Without it, who reads nothing and says nothing keeps a connection for ever.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_CLIENT_SECONDS * 1000)
    return listener


def load(model: str, config: EngineConfig, settings: ServerConfig) -> ServedModel:
    """The model with its engine, which has run a step and is not started."""
    loaded = load_model(model, config)
    if loaded.tokenizer is None:
        raise PackError(f"{loaded.folder} has no tokenizer, and a server needs one. Convert the model with it.")
    if not config.warmup_requests:
        warm_up(loaded.engine, 1)  # ready means that a step has run
    return ServedModel(
        names=settings.served_model_name or (loaded.manifest.name,),
        tokenizer=loaded.tokenizer,
        engine=AsyncEngine(
            loaded.engine,
            max_waiting=settings.max_waiting,
            max_unread=settings.max_unread,
            watchdog_seconds=settings.watchdog_seconds,
        ),
        max_model_len=loaded.engine.max_model_len,
        created=int(time.time()),
    )


async def _serve(
    load: Callable[[], ServedModel], settings: ServerConfig, listener: socket.socket, announce: Callable[[str], None]
) -> int:
    """Answers probes from the first moment, and requests once the model is there."""
    service = Service(settings)
    metrics = Metrics(service)
    app = make_app(service, metrics)
    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=FLUSH_SECONDS,
        )
    )
    ending = _Ending(service, server)
    ending.take_signals()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    watching = asyncio.ensure_future(metrics.watch_lag())
    try:
        service.model = await _in_daemon_thread(load)
        # What is there by now stays: the collector need not look at it. Nor need it look every few hundred objects, of
        # which a large body or a step of many streams makes more than that at once.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        service.model.engine.start()
        _say_where(listener, settings, announce)
        await serving
    finally:
        server.should_exit = True
        watching.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        service.text_threads.shutdown(wait=False, cancel_futures=True)
        if service.model is not None:
            await asyncio.to_thread(service.model.engine.close, HANGING_STEP_SECONDS)
    log.info("The server has ended.", extra={"fields": {"clean": ending.clean}})
    return 0 if ending.clean else 1


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: a signal is not the end here, but the beginning of a drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Ending:
    """What signals do: the first lets requests finish, the second ends them, the third ends the process.

    clean: every request that was taken in had the time to finish.
    """

    def __init__(self, service: Service, server: uvicorn.Server) -> None:
        self.clean = True
        self._service = service
        self._server = server
        self._signals = 0
        self._hurry = asyncio.Event()
        self._draining: asyncio.Future[None] | None = None

    def take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)

    def _signalled(self, number: int) -> None:
        self._signals += 1
        if self._service.model is None or self._signals > 2:
            # Loading cannot be interrupted and leaves nothing half done; and who asks a third time means it.
            os._exit(128 + number)
        if self._signals == 1:
            self._draining = asyncio.ensure_future(self._drain())
        else:
            self._hurry.set()

    async def _drain(self) -> None:
        assert self._service.model is not None
        engine, timeout = self._service.model.engine, self._service.settings.drain_timeout
        self._service.draining = True
        log.info("The server drains: it takes no new requests.", extra={"fields": {"drain_timeout": timeout}})
        finished = asyncio.ensure_future(engine.drain())
        hurried = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((finished, hurried), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not finished.done():
            self.clean = False
            with suppress(TimeoutError):
                await asyncio.wait_for(engine.drain(0), HANGING_STEP_SECONDS)
        hurried.cancel()
        self._server.should_exit = True


async def _in_daemon_thread(work: Callable[[], ServedModel]) -> ServedModel:
    """Not in a pool's: the interpreter would wait for that one at its end."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ServedModel] = loop.create_future()

    def run() -> None:
        try:
            loop.call_soon_threadsafe(done.set_result, work())
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)

    threading.Thread(target=run, name="packhorse-loading", daemon=True).start()
    return await done


def _say_where(listener: socket.socket, settings: ServerConfig, announce: Callable[[str], None]) -> None:
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log.info("The server is ready.", extra={"fields": {"url": url}})
    if settings.host not in LOCAL and not keys_of(settings):
        log.warning(
            "The server listens to other machines and asks for no key: whoever reaches it may use it. "
            "Give --api-key, or --host 127.0.0.1."
        )
    announce(url)
