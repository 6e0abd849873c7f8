"""Every error that a user can meet, with the HTTP status and the process exit code it maps to.

A message says what was wrong, where, and what to do next.
"""

from __future__ import annotations

from typing import ClassVar


class PackhorseError(Exception):
    """Base of all errors raised on purpose.

    `status`: HTTP status. `exit_code`: of the command line. `code`: a short machine-readable name, as in the OpenAI
    error body. `param`: the field or setting at fault, where there is one.
    """

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 2
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(PackhorseError):
    """One request is malformed; its neighbours are not affected."""

    status = 400
    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit the context or the cache."""

    code = "context_length_exceeded"


class ModelMismatch(InvalidRequest):
    """A request names a model other than the one that is loaded."""

    status = 404
    code = "model_mismatch"


class UnsupportedEndpoint(InvalidRequest):
    """A batch line asks for a URL or method that Packhorse does not serve."""

    status = 404
    code = "unsupported_endpoint"


class BodyTooLarge(InvalidRequest):
    """A request's body has more bytes than the server takes."""

    status = 413
    code = "body_too_large"


class UnsupportedMediaType(InvalidRequest):
    """A request's body is not JSON by its own account."""

    status = 415
    code = "unsupported_media_type"


class ConfigError(PackhorseError):
    """A setting is wrong, alone or beside another."""

    status = 400
    code = "invalid_setting"


class SourceError(PackhorseError):
    """A model source cannot be found or read."""

    code = "source_error"


class UnsupportedModel(PackhorseError):
    """A model cannot be cut at its attention calls; the message names the architecture and the operator."""

    code = "unsupported_model"


class ParityError(PackhorseError):
    """A converted model does not reproduce its source; no pack is written."""

    code = "parity_failed"


class PackError(PackhorseError):
    """A folder is not a pack, or is damaged, or has a format this version cannot read."""

    code = "pack_error"


class JobError(PackhorseError):
    """A batch job cannot run or cannot go on."""

    code = "job_error"


class StepError(PackhorseError):
    """A step failed in the runner; carried by the requests that were in it."""

    code = "step_failed"


class OutOfMemory(StepError):
    """A step needs more memory than there is."""

    status = 503
    code = "out_of_memory"


class DeadlineExceeded(PackhorseError):
    """A request's own time limit has passed."""

    status = 504
    code = "deadline_exceeded"


class QueueFull(PackhorseError):
    """As many requests wait as may; this one was not taken in, and nothing of it was computed.

    The server answers it with 429, a Retry-After header and the usual error body, and counts it; it stays healthy and
    ready, and the client tries again later.
    """

    status = 429
    code = "queue_full"


class Draining(PackhorseError):
    """The engine shuts down: it takes no new requests, and ends those that outlast the time it had for them.

    The server answers it with 503 and a Retry-After header and is not ready any more; another replica may serve it.
    """

    status = 503
    code = "draining"


class ReaderTooSlow(PackhorseError):
    """A stream was not read for so long that its request was ended: the engine waits for nobody, and keeps little."""

    status = 503
    code = "reader_too_slow"


class ClientLeft(PackhorseError):
    """The client closed its connection; what it asked for was ended, and nobody reads this."""

    status = 499
    code = "client_left"


class InvalidKey(PackhorseError):
    """A request brings no API key that the server knows."""

    status = 401
    code = "invalid_api_key"


class NotServed(PackhorseError):
    """A path or a method that the server does not have."""

    status = 404
    code = "not_found"


class MethodNotAllowed(PackhorseError):
    """A path that is served, but not with this method."""

    status = 405
    code = "method_not_allowed"


class NotReady(PackhorseError):
    """The server has no model yet; it answers 503 with a Retry-After header."""

    status = 503
    code = "not_ready"
