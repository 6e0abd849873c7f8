"""A real server with the real model, in a process of its own, shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.support.servers import ServerProcess

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODEL, "--num-blocks", "2048") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made
