"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from packhorse.errors import PackhorseError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(error: PackhorseError) -> dict[str, Any]:
    """The body that goes with HTTP status `error.status`."""
    return {
        "error": {
            "message": error.message,
            "type": error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_type(status: int) -> str:
    """OpenAI's name for a kind of error: the client's fault below 500, ours from there on."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
