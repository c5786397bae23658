"""Spans of requests, as an OpenTelemetry collector gets them."""

from __future__ import annotations

import gzip
import http.server
import threading

import pytest

from kvpager.cli import main
from server.running import ServerProcess, said

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

CLIENTS_TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def named(self, name):
        return [span for span in self.spans if span.name == name]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        for of_resource in sent.resource_spans:
            for scope in of_resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def collector(tmp_path_factory):
    """A collector, after a server was asked for two turns and for something wrong."""
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        store = tmp_path_factory.mktemp("traced") / "store"
        with ServerProcess(store, "--otlp-endpoint", collector.url) as process:
            first = process.client.chat(
                "a very private question",
                max_tokens=5,
                extra_body={"session_id": "ada"},
                extra_headers={"traceparent": f"00-{CLIENTS_TRACE}-b7ad6b7169203331-01"},
            )
            answer = first.choices[0].message.content
            second = process.client.chat(
                "a very private question",
                answer,
                "and now?",
                max_tokens=3,
                extra_body={"session_id": "ada"},
            )
            collector.cached = second.usage.prompt_tokens_details.cached_tokens
            process.client.post(
                "/v1/chat/completions",
                messages=said("x"),
                previous_response_id="x",
                session_id="nobody",
                max_tokens=1 << 20,
            )
            assert process.client.http.get("/metrics").status_code == 200
            assert process.terminate() == 0  # spans that were not sent yet are sent
        yield collector
        collector.shutdown()


def attributes(span):
    values = {}
    for pair in span.attributes:
        value = getattr(pair.value, pair.value.WhichOneof("value"))
        values[pair.key] = (
            [one.string_value for one in value.values] if hasattr(value, "values") else value
        )
    return values


def test_a_request_has_a_span_for_each_part_of_its_time(collector):
    first = collector.named("generate tiny-coder")[0]
    parts = [span for span in collector.spans if span.parent_span_id == first.span_id]
    assert [span.name for span in parts] == ["prepare", "queue", "prefill", "decode", "save"]
    for span in parts:
        assert first.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= first.end_time_unix_nano
    queue, prefill, decode = parts[1:4]
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano


def test_spans_carry_the_counts_of_the_answer(collector):
    prefill, decode = collector.named("prefill")[1], collector.named("decode")[1]
    found = attributes(prefill)
    assert found["gen_ai.usage.cache_read.input_tokens"] == collector.cached > 0
    assert (
        found["gen_ai.usage.cache_read.input_tokens"] + found["kvpager.computed_tokens"]
        == found["gen_ai.usage.input_tokens"]
    )
    assert attributes(decode)["gen_ai.usage.output_tokens"] == 3
    assert attributes(decode)["gen_ai.response.finish_reasons"] == ["length"]


def test_the_clients_own_trace_goes_on(collector):
    span = collector.named("generate tiny-coder")[0]
    assert span.trace_id.hex() == CLIENTS_TRACE
    assert attributes(span)["gen_ai.conversation.id"] == "ada"


def test_no_span_has_a_text_and_what_is_asked_for_all_the_time_has_none(collector):
    assert "private" not in str(collector.spans)
    assert not [span for span in collector.spans if "metrics" in span.name]


def test_an_address_that_is_none_is_refused_by_option(capsys):
    assert main(["serve", "--otlp-endpoint", "localhost:4318"]) in (1, 2)
    assert "--otlp-endpoint is 'localhost:4318'" in capsys.readouterr().err
