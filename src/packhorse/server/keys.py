"""Who may ask: requests under /v1 and for tokens must bring one of the API keys, where there are any."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from packhorse.config import ServerConfig
from packhorse.errors import ConfigError, InvalidKey
from packhorse.server.record import record_of
from packhorse.server.reply import error_reply

KEYS_VARIABLE = "PACKHORSE_API_KEY"

OPEN = ("/health/live", "/health/ready", "/metrics", "/version", "/docs", "/openapi.json")
"""Paths that tell nothing of what users ask and answer: probes and scrapers have no key."""


def keys_of(settings: ServerConfig, environment: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """Keys of the settings, of their file and of the environment variable. Raises ConfigError for a bad file."""
    keys = [*settings.api_key, *environment.get(KEYS_VARIABLE, "").split()]
    if settings.api_key_file is not None:
        try:
            found = settings.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{settings.api_key_file} cannot be read: {error}.", param="api_key_file") from error
        if not found:
            raise ConfigError(f"{settings.api_key_file} holds no key: write one a line.", param="api_key_file")
        keys += found
    return tuple(key.encode() for key in keys)


class RequireKey:
    """ASGI middleware that answers 401 unless `Authorization: Bearer KEY` brings one of the keys.

    Headers are bytes, and so are keys: nothing a client sends has to be text. All keys are compared, each in a time
    that does not depend on how much of it is right.
    """

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._digests = tuple(map(_digest, keys))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._known(_bearer(scope)):
            await self._app(scope, receive, send)
            return
        error = record_of(scope).error = InvalidKey(
            "No valid API key: send one of the server's as `Authorization: Bearer KEY`."
        )
        await error_reply(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _known(self, key: bytes | None) -> bool:
        if not self._digests:
            return True
        given = _digest(key or b"")
        return any([hmac.compare_digest(given, digest) for digest in self._digests]) and key is not None  # noqa: C419


def _bearer(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            return key.strip() if kind.lower() == b"bearer" else None
    return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
