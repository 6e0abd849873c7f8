"""What the OpenAPI document says holds, for whatever body fits it or just does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.jobs.scripted import byte_tokenizer, cheap
from tests.support.engines import scripted_engine
from tests.support.servers import ScriptedServer

pytestmark = pytest.mark.slow

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
ROUTES = [
    ("POST", "/v1/chat/completions", 350),
    ("POST", "/v1/completions", 350),
    ("POST", "/tokenize", 200),
    ("POST", "/detokenize", 200),
    ("GET", "/v1/models/{name}", 50),
    ("GET", "/v1/models", 10),
    ("GET", "/health/live", 10),
    ("GET", "/health/ready", 10),
    ("GET", "/metrics", 10),
    ("GET", "/version", 10),
]
"""And how many examples of each: bodies that fit the document, and as many that do not. Together more than 2,000."""


@pytest.fixture(scope="module")
def served() -> Iterator[ScriptedServer]:
    tokenizer = byte_tokenizer()
    engine = scripted_engine(cheap(tokenizer.vocab_size), tokenizer=tokenizer, num_blocks=256, max_model_len=256)
    with ScriptedServer(engine, tokenizer) as server:
        yield server
    server.assert_idle()


@pytest.fixture(scope="module")
def document(served: ScriptedServer) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def test_the_document_has_these_routes_and_no_others(document: Any) -> None:
    found = {(operation.ok().method.upper(), operation.ok().path) for operation in document.get_all_operations()}
    assert found == {(method, path) for method, path, _ in ROUTES}
    assert 2 * sum(count for *_, count in ROUTES if count > 10) >= 2_000


@pytest.mark.parametrize("mode", MODES, ids=["fitting", "unfitting"])
@pytest.mark.parametrize(("method", "path", "count"), ROUTES, ids=[path for _, path, _ in ROUTES])
def test_a_route_keeps_to_the_document(document: Any, method: str, path: str, count: int, mode: GenerationMode) -> None:
    operation = document[path][method]
    has_input = bool(operation.body)
    if mode is GenerationMode.NEGATIVE and not has_input:
        return  # nothing about such a request can be wrong
    tried = 0

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    def try_it(case: Any) -> None:
        nonlocal tried
        tried += 1
        case.call_and_validate(checks=CHECKS)

    try_it()
    assert tried >= min(count, 1 if not has_input else count)
