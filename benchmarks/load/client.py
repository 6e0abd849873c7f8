"""A client that costs next to nothing, because it shares the machine with the server that it measures."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass
from typing import Any

_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_TEXT = re.compile(rb'"(?:text|content)":"[^"]')


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request. status: 0 when the connection broke. In seconds: ttft, to the first text, and whole.

    ended: as a stream must, with the end marker; failed: with an error event, or an error status.
    """

    status: int
    tokens: int
    ttft: float | None
    seconds: float
    ended: bool
    failed: bool


async def ask(port: int, body: dict[str, Any], path: str = "/v1/completions") -> Answer:
    """Send a streaming request on a connection of its own and read its answer to the end."""
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    begin = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    ttft, tail, first = None, b"", b""
    try:
        while part := await reader.read(1 << 16):
            first = first or part[:12]
            if ttft is None and _TEXT.search(part):
                ttft = time.perf_counter() - begin
            tail = (tail + part)[-2000:]
    except ConnectionError:
        pass
    finally:
        writer.close()
    status = int(first[9:12]) if first else 0
    usage = _USAGE.findall(tail)
    return Answer(
        status=status,
        tokens=int(usage[-1]) if usage else 0,
        ttft=ttft,
        seconds=time.perf_counter() - begin,
        ended=b"data: [DONE]" in tail,
        failed=status != 200 or b'{"error":' in tail,
    )
