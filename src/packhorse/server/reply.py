"""JSON answers and error answers, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from packhorse.api.errors import error_body
from packhorse.errors import PackhorseError

RETRY_AFTER_SECONDS = 1
"""What Retry-After says: places become free at the pace of single requests."""

_RETRY_STATUSES = (429, 503)


def json_reply(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def error_reply(error: PackhorseError, headers: Mapping[str, str] | None = None) -> Response:
    """The error's status and body; where trying again may help, when."""
    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status in _RETRY_STATUSES else {}
    return json_reply(error_body(error), error.status, {**retry, **(headers or {})})
