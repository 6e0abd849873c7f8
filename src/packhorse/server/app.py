"""The routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from packhorse import __version__
from packhorse.errors import PackhorseError
from packhorse.server.generate import generate
from packhorse.server.reply import error_reply, json_reply
from packhorse.server.service import Service


def make_app(service: Service) -> FastAPI:
    """The ASGI application over a service, whose model may still be on its way."""
    app = FastAPI(title="Packhorse", version=__version__, redoc_url=None)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(service, "chat", request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(service, "completions", request)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_reply({"object": "list", "data": _model_cards(service)})

    @app.get("/health/live")
    async def live() -> Response:
        return json_reply({"status": "live"})

    @app.get("/health/ready")
    async def ready() -> Response:
        return json_reply({"status": "ready"}) if service.ready else json_reply({"status": "not ready"}, 503)

    @app.get("/version")
    async def version() -> Response:
        return json_reply({"version": __version__})

    app.add_exception_handler(PackhorseError, _refused)
    app.add_exception_handler(HTTPException, _not_routed)
    return app


def _model_cards(service: Service) -> list[dict[str, Any]]:
    model = service.model
    if model is None:
        return []
    return [
        {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "packhorse",
            "root": model.name,
            "max_model_len": model.max_model_len,
        }
        for name in model.names
    ]


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, PackhorseError)
    return error_reply(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = PackhorseError(f"{request.method} {request.url.path} is not served: {error.detail}.", code="not_found")
    failure.status = error.status_code  # type: ignore[misc]
    return error_reply(failure)
