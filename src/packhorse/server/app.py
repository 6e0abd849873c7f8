"""The routes, and what stands around them: a record of each request, keys, errors in one shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from packhorse import __version__
from packhorse.errors import InvalidRequest, MethodNotAllowed, NotServed, PackhorseError
from packhorse.server import openapi, tokens
from packhorse.server.generate import generate
from packhorse.server.keys import RequireKey, keys_of
from packhorse.server.log import log_request
from packhorse.server.metrics import Metrics
from packhorse.server.record import Record, Recorded, record_of, unexpected
from packhorse.server.reply import error_reply, json_reply
from packhorse.server.service import ServedModel, Service


def make_app(service: Service, metrics: Metrics) -> ASGIApp:
    """The ASGI application over a service, whose model may still be on its way.

        Recorded ─► RequireKey ─► FastAPI's routes
        log, metrics    401           PackhorseError ─► its status and body

    Raises ConfigError for API keys that cannot be had.
    """

    def over(record: Record) -> None:
        metrics.request_over(record)
        log_request(record)

    return Recorded(RequireKey(_routes(service, metrics), keys_of(service.settings)), over)


def _routes(service: Service, metrics: Metrics) -> FastAPI:
    app = FastAPI(title="Packhorse", version=__version__, redoc_url=None, redirect_slashes=False)

    @app.post("/v1/chat/completions", openapi_extra=openapi.text_route("chat"))
    async def chat_completions(request: Request) -> Response:
        return await generate(service, "chat", request)

    @app.post("/v1/completions", openapi_extra=openapi.text_route("completions"))
    async def completions(request: Request) -> Response:
        return await generate(service, "completions", request)

    @app.get("/v1/models", openapi_extra=openapi.models_route())
    async def models() -> Response:
        model = service.served()
        return json_reply({"object": "list", "data": [_model_card(model, name) for name in model.names]})

    @app.get("/v1/models/{name:path}", openapi_extra=openapi.model_route())
    async def model(request: Request) -> Response:
        served, name = service.served(), request.path_params["name"]
        if name not in served.names:
            raise NotServed(f"There is no model {name!r} here, but {' and '.join(served.names)}.", param="model")
        return json_reply(_model_card(served, name))

    @app.post("/tokenize", openapi_extra=openapi.tokenize_route())
    async def tokenize(request: Request) -> Response:
        return await tokens.tokenize(service, request)

    @app.post("/detokenize", openapi_extra=openapi.detokenize_route())
    async def detokenize(request: Request) -> Response:
        return await tokens.detokenize(service, request)

    @app.get("/health/live", openapi_extra=openapi.probe_route())
    async def live() -> Response:
        return json_reply({"status": "live"})

    @app.get("/health/ready", openapi_extra=openapi.probe_route())
    async def ready() -> Response:
        return json_reply({"status": service.standing}, 200 if service.standing == "ready" else 503)

    @app.get("/metrics", openapi_extra=openapi.metrics_route())
    async def show_metrics(request: Request) -> Response:
        content, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    @app.get("/version", openapi_extra=openapi.version_route())
    async def version() -> Response:
        return json_reply({"version": __version__})

    app.add_exception_handler(PackhorseError, _refused)
    app.add_exception_handler(HTTPException, _not_routed)
    app.add_exception_handler(Exception, _broken)
    return app


def _model_card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "packhorse",
        "root": model.name,
        "max_model_len": model.max_model_len,
    }


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, PackhorseError)
    record_of(request.scope).error = error
    return error_reply(error)


async def _not_routed(request: Request, error: Exception) -> Response:
    """What FastAPI itself refuses: a path, a method, a body that breaks off."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    kinds: dict[int, PackhorseError] = {
        404: NotServed(f"{what} is not served. /docs lists what is."),
        405: MethodNotAllowed(f"{what} is not served, but another method of it is. /docs says which."),
    }
    failure = kinds.get(error.status_code) or InvalidRequest(f"{what} cannot be answered: {error.detail}.")
    record_of(request.scope).error = failure
    return error_reply(failure, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    """What nobody expected; `Recorded` gets it too, and logs all of it."""
    failure = record_of(request.scope).error = unexpected(error)
    return error_reply(failure)
