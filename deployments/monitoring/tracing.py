"""Traces of requests through OpenTelemetry: times, counts and names; no text, no tokens, no secrets.

Spans of targets and drafters are made from the coordinator's timeline at a request's end, so steps cost no more.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.coordinator.request import Delta, Request, Timeline

_PROPAGATOR = TraceContextTextMapPropagator()  # the W3C format


def make_provider(exporter: SpanExporter) -> TracerProvider:
    """Return a provider that sends spans in batches from a thread. The environment sets sampling, by default all."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "consort"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestTracer:
    """Traces the requests of one coordinator. For use in one event loop."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("consort")
        self._open: dict[int, tuple[Span, Timeline]] = {}  # by request id

    def start_server_span(self, path: str, scope: Scope) -> Span:
        """Start the span of an HTTP request, in the client's trace if the headers name one. The caller ends it."""
        attributes = {
            "http.request.method": "POST",
            "http.route": path,
            "consort.request_id": scope["state"]["request_id"],
            "consort.api_key": scope["state"]["key"].name,
        }
        context = _PROPAGATOR.extract(Headers(scope=scope))
        return self._tracer.start_span(f"POST {path}", context, SpanKind.SERVER, attributes)

    def start(self, request: Request) -> Request:
        """Start the span of a request that enters the queue. Returns the request with a timeline."""
        timeline = Timeline()
        span = self._tracer.start_span("request", start_time=timeline.received_ns)
        if not span.is_recording():  # not sampled
            return request
        self._open[request.request_id] = span, timeline
        return replace(request, timeline=timeline)

    def mark_admitted(self, request: Request) -> None:
        if request.timeline is not None:
            request.timeline.admitted_ns = time.time_ns()

    def end(self, request: Request, delta: Delta | None) -> None:
        """End a request's span. delta: its last one; None if it was cancelled. Ignored if it has ended before."""
        span, timeline = self._open.pop(request.request_id, (None, None))
        if span is None or timeline is None:
            return
        span.set_attributes(_request_attributes(request))
        span.set_attributes({"consort.end": "cancelled"} if delta is None else _end_attributes(delta))
        if delta is not None and delta.error is not None:
            span.set_status(StatusCode.ERROR, type(delta.error).__name__)
        self._record(timeline, trace.set_span_in_context(span))
        span.end()

    def shut_down(self) -> None:
        self._provider.shutdown()

    def _record(self, timeline: Timeline, parent: Context) -> None:
        self._span("queue", parent, timeline.received_ns, timeline.admitted_ns)
        for stay in timeline.stays:
            where = {"consort.role": stay.role, "consort.replica": stay.replica}
            if stay.role == "drafter":
                drafts = where | {"consort.drafts": stay.messages, "consort.drafted": stay.tokens}
                self._span("draft", parent, stay.began_ns, stay.ended_ns, drafts)
                continue
            self._span("prefill", parent, stay.began_ns, stay.first_ns or stay.ended_ns, where)
            if stay.first_ns is not None:
                steps = where | {"consort.steps": stay.messages, "consort.tokens": stay.tokens}
                self._span("decode", parent, stay.first_ns, stay.last_ns, steps)

    def _span(
        self,
        name: str,
        parent: Context,
        began_ns: int,
        ended_ns: int | None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self._tracer.start_span(name, parent, attributes=attributes, start_time=began_ns).end(ended_ns)


def _request_attributes(request: Request) -> dict[str, Any]:
    attributes = {
        "gen_ai.request.model": request.endpoint.name,
        "gen_ai.request.max_tokens": request.params.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "consort.target": request.endpoint.target,
        "consort.draft_length": request.max_draft_length,
    }
    drafter = request.endpoint.drafter
    return attributes if drafter is None else attributes | {"consort.drafter": drafter}


def _end_attributes(last: Delta) -> dict[str, Any]:
    statistics = last.statistics
    attributes: dict[str, Any] = {
        "gen_ai.usage.output_tokens": statistics.committed,
        "consort.steps": statistics.steps,
        "consort.drafted": statistics.drafted,
        "consort.accepted": statistics.accepted,
        "consort.rejections": statistics.missed,
        "consort.hits": statistics.hits,
    }
    if last.finish is not None:
        attributes["gen_ai.response.finish_reasons"] = [last.finish]
    if last.error is not None:
        attributes["error.type"] = type(last.error).__name__
    return attributes


class TracingMiddleware:
    """ASGI middleware that gives each request its span, and sends the span's id as `traceparent`.

    opentelemetry-instrumentation-asgi would put texts of exceptions and clients' addresses into spans.
    """

    def __init__(self, app: ASGIApp, *, tracer: RequestTracer, paths: Collection[str]) -> None:
        self._app, self._tracer, self._paths = app, tracer, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_server_span(scope["path"], scope)

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(StatusCode.ERROR)
                _PROPAGATOR.inject(MutableHeaders(scope=message), trace.set_span_in_context(span))
            await send(message)

        with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, send_on)
            except Exception:  # answered by an outer layer; its text stays out of the span
                span.set_status(StatusCode.ERROR)
                raise
