"""The body of a request: of a known type, not too large, and JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from packhorse.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType


async def read_body(request: Request, limit: int) -> bytes:
    """All of it. Raises UnsupportedMediaType or BodyTooLarge; a body that is too large is not read to its end."""
    _check_type(request.headers.get("content-type"))
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def parse_json(raw: bytes) -> Any:
    """Raises InvalidRequest for what is not JSON: NaN, half a UTF-16 pair and too deep nesting are not."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None


def _check_type(content_type: str | None) -> None:
    """JSON by whatever name; a client that says nothing means it too."""
    if content_type is None:
        return
    kind = content_type.split(";", 1)[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"The content type is {kind!r}: send the body as application/json.")


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body has more than {limit:,} bytes, which is the limit (max_body_bytes).")
