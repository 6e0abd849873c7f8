"""What is known of one HTTP request when it is over: one JSON line in the log, and what is counted.

A record is made when a request comes, filled in on the way, and written once when it is over. It holds sizes and times,
never a text, unless log_prompts asks for them.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from packhorse.engine.outputs import RequestOutput
from packhorse.errors import ClientLeft, PackhorseError, ReaderTooSlow
from packhorse.server.reply import error_reply

Outcome = Literal["ok", "refused", "failed", "left"]
"""ok: answered. refused: the client's fault, or no room. failed: ours. left: the client did not wait or read."""

_SCOPE_KEY = "packhorse.record"

log = logging.getLogger("packhorse.server")


@dataclass(slots=True)
class Record:
    """request_id: also the header x-request-id and part of the body's id. error: of the answer or in mid-stream.

    taken_in: the engine has it, or had. model … answers: of requests for text; the last two only when texts are
    logged, answers by request and choice. Times in seconds: began (monotonic),
    ttft_s to the first piece of a stream with text.
    """

    method: str
    path: str
    request_id: str = field(default_factory=lambda: secrets.token_hex(12))
    began: float = field(default_factory=time.monotonic)
    status: int | None = None
    error: PackhorseError | None = None
    taken_in: bool = False
    model: str | None = None
    stream: bool | None = None
    choices: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    prompts: Any = None
    answers: dict[str, str] | None = None

    @property
    def outcome(self) -> Outcome:
        if isinstance(self.error, (ClientLeft, ReaderTooSlow)):
            return "left"
        status = self.error.status if self.error is not None else self.status or 500
        if status < 400:
            return "ok"
        return "refused" if not self.taken_in and (status < 500 or status == 503) else "failed"

    def note(self, output: RequestOutput) -> None:
        """News of one of its prompts."""
        for choice in output.outputs:
            self.completion_tokens = (self.completion_tokens or 0) + len(choice.token_ids)
            if self.stream and self.ttft_s is None and choice.text:
                self.ttft_s = round(time.monotonic() - self.began, 6)
            if choice.finish_reason is not None:
                self.finish_reasons.append(choice.finish_reason)
            if self.answers is not None:
                name = f"{output.request_id}/{choice.index}"
                self.answers[name] = self.answers.get(name, "") + choice.text
        metrics = output.metrics
        if metrics is not None and metrics.first_scheduled_time is not None:
            self.queue_s = round(metrics.first_scheduled_time - metrics.arrival_time, 6)

    def line(self) -> dict[str, Any]:
        """What the log says: all that is known."""
        known = {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error.code if self.error is not None else None,
            "model": self.model,
            "stream": self.stream,
            "choices": self.choices,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons or None,
            "queue_s": self.queue_s,
            "ttft_s": self.ttft_s,
            "seconds": round(time.monotonic() - self.began, 6),
            "prompts": self.prompts,
            "answers": list(self.answers.values()) if self.answers is not None else None,
        }
        return {name: value for name, value in known.items() if value is not None}


def record_of(scope: Scope) -> Record:
    """The record of the request that is being answered."""
    record: Record = scope[_SCOPE_KEY]
    return record


class Recorded:
    """The outermost ASGI middleware: makes a record of each request, and turns what nobody caught into a 500."""

    def __init__(self, app: ASGIApp, over: Callable[[Record], None]) -> None:
        self._app = app
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[_SCOPE_KEY] = Record(scope["method"], scope["path"])

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            log.exception(
                "A request failed with an error that nobody expected.",
                extra={"fields": {"request_id": record.request_id}},
            )
            record.error = unexpected(error)
            if record.status is None:
                await error_reply(record.error)(scope, receive, noting)
        finally:
            self._over(record)


def unexpected(error: Exception) -> PackhorseError:
    """What the client is told of an error that is ours: no more than its kind, for the rest may be somebody's text."""
    return PackhorseError(f"The server failed: {type(error).__name__}. Its log says more.")
