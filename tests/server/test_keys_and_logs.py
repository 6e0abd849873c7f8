"""Who may ask, and what is written down of it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest

from packhorse.config import ServerConfig
from packhorse.errors import ConfigError
from packhorse.server.keys import keys_of
from packhorse.server.log import JsonLines
from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import scripted_engine
from tests.support.servers import ScriptedServer, ServerProcess, events_of

SECRET = "sk-geheim-\u00e4"
PROMPT = "a prompt that nobody else may read"


def serving(**settings: Any) -> ScriptedServer:
    tokenizer = byte_tokenizer()
    return ScriptedServer(scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer), tokenizer, **settings)


def asked(server: ScriptedServer, headers: dict[str, str | bytes], path: str = "/v1/models") -> int:
    return httpx2.get(f"{server.url}{path}", headers=headers).status_code  # type: ignore[arg-type]


def test_without_keys_everybody_may_ask() -> None:
    with serving() as server:
        assert asked(server, {}) == 200
        assert asked(server, {"authorization": "Bearer whatever"}) == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer wrong",
        b"Bearer key-",
        b"Bearer key-11",
        b"Basic key-1",
        b"key-1",
        "Bearer k\u00e9y".encode("latin-1"),
        "Bearer \u94a5\u5319".encode(),
        b"Bearer \xff\xfe\xfd",
        b"Bearer " + b"x" * 8000,
    ],
)
def test_a_wrong_key_is_a_401_whatever_it_is_made_of(header: bytes | None) -> None:
    with serving(api_key=("key-1", SECRET)) as server:
        response = httpx2.get(f"{server.url}/v1/models", headers={} if header is None else {"authorization": header})  # type: ignore[dict-item]
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


def test_each_of_the_keys_opens() -> None:
    with serving(api_key=("key-1", SECRET)) as server:
        for key in ("key-1", SECRET):
            assert asked(server, {"authorization": b"Bearer " + key.encode()}) == 200
            assert asked(server, {"authorization": b"bearer  " + key.encode()}) == 200


def test_a_header_that_no_client_library_would_send_is_a_401_too() -> None:
    async def raw(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\nauthorization: Bearer \x80\xff\x9c\r\n\r\n")
        answer = await reader.read(12)
        writer.close()
        return answer

    with serving(api_key=("key-1",)) as server:
        assert asyncio.run(raw(server.port)) == b"HTTP/1.1 401"


def test_probes_and_scrapers_need_no_key_and_everything_that_asks_the_model_does() -> None:
    with serving(api_key=("key-1",)) as server:
        for path in ("/health/live", "/health/ready", "/metrics", "/version", "/openapi.json", "/docs"):
            assert asked(server, {}, path) == 200
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert httpx2.post(f"{server.url}{path}", json={}).status_code == 401
        assert asked(server, {}, "/v1/nothing") == 401


def test_keys_come_from_settings_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("two\n\nthree\n", "utf-8")
    settings = ServerConfig(api_key=("one",), api_key_file=file)
    assert keys_of(settings, {"PACKHORSE_API_KEY": "four five"}) == (b"one", b"four", b"five", b"two", b"three")
    assert keys_of(ServerConfig(), {}) == ()
    with pytest.raises(ConfigError, match="api_key is"):
        ServerConfig(api_key=(" ",))


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The requests in the log, as they would be written."""
    formatter = JsonLines()
    found = [json.loads(formatter.format(record)) for record in caplog.records]
    return [line for line in found if line["message"] == "request"]


def test_the_log_has_sizes_times_and_outcomes_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": PROMPT, "max_tokens": 7, "temperature": 0, "user": "somebody"}
    headers = {"authorization": "Bearer key-1"}
    with caplog.at_level(logging.DEBUG), serving(api_key=("key-1",)) as server:
        url = f"{server.url}/v1/completions"
        whole = httpx2.post(url, json=body, headers=headers)
        events_of(httpx2.post(url, json=body | {"stream": True, "n": 2, "temperature": 1}, headers=headers))
        httpx2.post(url, json=body | {"temperature": -1}, headers=headers)
        httpx2.post(url, json=body)
        httpx2.get(f"{server.url}/health/ready")
    first, second, bad, unknown = lines(caplog)
    expected = {"outcome": "ok", "status": 200, "prompt_tokens": len(PROMPT), "completion_tokens": 7, "choices": 1}
    assert expected.items() <= first.items()
    assert first["request_id"] == whole.headers["x-request-id"]
    assert whole.json()["id"] == f"cmpl-{first['request_id']}"
    assert first["finish_reasons"] == ["length"]
    assert 0 <= first["queue_s"] <= first["seconds"]
    assert {"stream": True, "choices": 2, "completion_tokens": 14}.items() <= second.items()
    assert 0 < second["ttft_s"] <= second["seconds"]
    assert (bad["outcome"], bad["status"], bad["error"]) == ("refused", 400, "invalid_request")
    assert (unknown["outcome"], unknown["status"], unknown["error"]) == ("refused", 401, "invalid_api_key")
    everything = "".join(JsonLines().format(record) for record in caplog.records)
    assert PROMPT not in everything
    assert whole.json()["choices"][0]["text"] not in everything
    assert "key-1" not in everything


def test_texts_are_logged_for_who_asks_for_them(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": PROMPT, "max_tokens": 7, "temperature": 0}
    with caplog.at_level(logging.INFO), serving(log_prompts=True) as server:
        texts = [httpx2.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]]
        events = events_of(httpx2.post(f"{server.url}/v1/completions", json=body | {"stream": True}))
        texts.append("".join(event["choices"][0]["text"] for event in events))
    assert [(line["prompts"], line["answers"]) for line in lines(caplog)] == [([PROMPT], [text]) for text in texts]


def test_an_error_that_nobody_expected_is_a_500_in_openais_shape_and_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a secret of the server")

    with serving() as server:
        monkeypatch.setattr("packhorse.server.generate.prepare", broken)
        response = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "secret" not in response.text
        monkeypatch.undo()
        assert httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200
    assert lines(caplog)[0]["request_id"] == response.headers["x-request-id"]
    assert lines(caplog)[0]["outcome"] == "failed"
    assert "a secret of the server" in caplog.text


@pytest.mark.slow
def test_the_process_logs_json_lines_and_warns_when_it_is_open_to_all() -> None:
    with ServerProcess("smollm2-135m-instruct", "--num-blocks", "64", "--host", "0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        httpx2.post(f"{url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        written = [json.loads(line) for line in server.log().splitlines()]
        assert any("asks for no key" in line["message"] for line in written if line["level"] == "warning")
        assert [line["outcome"] for line in written if line["message"] == "request"] == ["ok"]
        assert PROMPT not in server.log()
    with ServerProcess("smollm2-135m-instruct", "--num-blocks", "64", "--host", "0.0.0.0", "--api-key", "k") as server:
        assert "asks for no key" not in server.log()
