"""The OpenAPI schema: every endpoint, errors in their shape, and no field that is not described."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def schema(server):
    return server.http.get("/openapi.json").json()


def test_the_endpoints_are_described(schema):
    paths = set(schema["paths"])
    assert paths >= {
        "/health",
        "/ready",
        "/version",
        "/metrics",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages",
        "/v1/sessions",
        "/v1/sessions/{name}/messages",
        "/v1/sessions/{name}/rename",
        "/slots/{slot}",
        "/tokenize",
        "/detokenize",
    }
    assert not any(path.startswith("/monitor") for path in paths)


def test_errors_have_a_schema_everywhere(schema):
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            assert {"4XX", "5XX"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"]


def test_bodies_refuse_unknown_fields(schema):
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest"):
        assert schema["components"]["schemas"][name]["additionalProperties"] is False
