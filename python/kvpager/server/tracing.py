"""OpenTelemetry spans: one for each request, and one for each part of its time.

Without an SDK they cost nothing. Names of attributes are those of
OpenTelemetry's conventions for generative AI where it has one, and begin with `kvpager.` elsewhere.
No span has the text of a prompt or an answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from kvpager import __version__
from kvpager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvpager.requests.request import RequestCompletion
    from kvpager.server.errors import ApiError

_NOT_TRACED = "health$,ready$,version$,metrics$,events"  # polled endpoints
_tracer = trace.get_tracer("kvpager.server", __version__)


class RequestSpan:
    """The span of one request, from its check to its end. Any thread may use it."""

    def __init__(self, model: str, **attributes: Any) -> None:
        """Begins the span. attributes: None where the request sets none."""
        known = {name: value for name, value in attributes.items() if value is not None}
        self._span = _tracer.start_span(
            f"generate {model}",
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": model,
                **{_NAMES[name]: value for name, value in known.items()},
            },
        )
        self._context = trace.set_span_in_context(self._span)

    @contextmanager
    def part(self, name: str) -> Iterator[Span]:
        """Wraps a part of the work in a child span."""
        with _tracer.start_as_current_span(name, self._context) as span:
            yield span

    def choice(
        self, number: int, completion: RequestCompletion, consumed: int, recomputed: int
    ) -> None:
        """Adds the spans of a choice that ended now: queue, prefill and decode.

        number: of the choice, from 0. consumed: restored tokens that replaced a prefill.
        recomputed: tokens of damaged chunks.
        """
        ended = time.time_ns()
        submitted = ended - _ns(completion.total_s)
        admitted = submitted + _ns(completion.queue_s)
        first = completion.first_token_s
        answering = ended if first is None else submitted + _ns(first)
        common = {"kvpager.choice": number}
        self._past("queue", submitted, admitted, common)
        self._past(
            "prefill",
            admitted,
            answering,
            {
                **common,
                "gen_ai.usage.input_tokens": completion.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": completion.cached_tokens,
                "kvpager.computed_tokens": completion.computed_tokens,
                "kvpager.restored_tokens_consumed": consumed,
                "kvpager.recomputed_tokens": recomputed,
            },
        )
        if first is not None:
            self._past(
                "decode",
                answering,
                ended,
                {
                    **common,
                    "gen_ai.usage.output_tokens": len(completion.tokens),
                    "gen_ai.response.finish_reasons": [completion.finish_reason],
                },
            )

    def failed(self, error: ApiError) -> None:
        """Records the error of the response."""
        self._span.set_attribute("error.type", str(error.code or error.kind))
        self._span.set_status(Status(StatusCode.ERROR, error.kind))

    def end(self) -> None:
        """Ends the span; further calls do nothing."""
        if self._span.is_recording():
            self._span.end()

    def _past(self, name: str, begin: int, end: int, attributes: dict[str, Any]) -> None:
        span = _tracer.start_span(name, self._context, start_time=begin, attributes=attributes)
        span.end(end)


_NAMES = {
    "conversation": "gen_ai.conversation.id",
    "choices": "gen_ai.request.choice.count",
    "max_tokens": "gen_ai.request.max_tokens",
    "seed": "gen_ai.request.seed",
    "tenant": "kvpager.tenant",
    "priority": "kvpager.priority",
}


@contextmanager
def exported(endpoint: str | None) -> Iterator[None]:
    """Sends spans to a collector by OTLP over HTTP while it is open; None: sends none.

    endpoint: of all signals, such as http://localhost:4318. What else there is to set is read from
    OpenTelemetry's environment variables, such as OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS.

    Raises:
        InvalidArgumentError: a package that it needs is missing.
    """
    if endpoint is None:
        yield
        return
    try:
        import opentelemetry.instrumentation.fastapi  # noqa: F401  # for `trace_http`
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"otlp_endpoint needs {error.name}; pip install '.[tracing]' in a checkout"
        ) from error

    described = Resource.create({"service.name": "kvpager", "service.version": __version__})
    provider = TracerProvider(resource=described)
    target = endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target)))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


def trace_http(app: FastAPI) -> None:
    """Adds a span for every HTTP request, a child of the client's span if it sends one."""
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(
        app, excluded_urls=_NOT_TRACED, exclude_spans=["receive", "send"]
    )


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
