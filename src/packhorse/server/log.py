"""The server's log: JSON lines on standard error."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

from packhorse.server.record import Record

log = logging.getLogger("packhorse.server")


class JsonLines(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, logger, message, and what the call gave in `extra["fields"]`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def log_to_stderr() -> None:
    """Everything that any library logs goes the same way; quiet ones of it only when they warn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("packhorse").setLevel(logging.INFO)


def log_request(record: Record) -> None:
    """One line for a request that is over. Probes and scrapes are not worth one unless we fail them."""
    if record.outcome != "failed" and record.path.startswith(("/health/", "/metrics")):
        return
    level = logging.ERROR if record.outcome == "failed" else logging.INFO
    log.log(level, "request", extra={"fields": record.line()})
