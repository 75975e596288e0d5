"""Traces of requests through OpenTelemetry. Spans have times, counts and names: no text, no tokens, no secrets.

What targets and drafters did is told from the timeline that the coordinator keeps, when a request has ended: so
nothing is done for it at a step, and replicas know of no traces. Imported only where traces are wanted.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from actors.coordinator.request import Delta, Request
from actors.coordinator.timeline import Stay, Timeline

_PROPAGATOR = TraceContextTextMapPropagator()  # W3C's


def make_provider(exporter: SpanExporter) -> TracerProvider:
    """Sends spans in batches from a thread of its own. Sampling is as the environment says; by default all are sent."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "consort"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestTracer:
    """Of one coordinator. One event loop uses it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer("consort")
        self._open: dict[int, tuple[Span, Timeline]] = {}  # by request id

    def answering(self, name: str, headers: Mapping[str, str]) -> Span:
        """The span of an HTTP request, of the client's trace if its headers name one. Somebody has to end it."""
        return self._tracer.start_span(name, _PROPAGATOR.extract(headers), SpanKind.SERVER)

    def headers(self, span: Span) -> dict[str, str]:
        """What tells others which span it is."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        return carrier

    def received(self, request: Request) -> Request:
        """A request to the models is about to wait for its turn. The one that is returned keeps a timeline."""
        timeline = Timeline()
        span = self._tracer.start_span("request", start_time=timeline.received_ns)
        if not span.is_recording():  # nobody wants this one
            return request
        self._open[request.request_id] = span, timeline
        return replace(request, timeline=timeline)

    def admitted(self, request: Request) -> None:
        """It begins."""
        if request.timeline is not None:
            request.timeline.admitted_ns = time.time_ns()

    def ended(self, request: Request, delta: Delta | None) -> None:
        """It has ended with its last delta, or was given up. What has ended already is ignored."""
        span, timeline = self._open.pop(request.request_id, (None, None))
        if span is None or timeline is None:
            return
        span.set_attributes(_of_request(request))
        span.set_attributes({"consort.end": "cancelled"} if delta is None else _of_end(delta))
        if delta is not None and delta.error is not None:
            span.set_status(StatusCode.ERROR, type(delta.error).__name__)
        self._tell(timeline, trace.set_span_in_context(span))
        span.end()

    def shut_down(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    def _tell(self, timeline: Timeline, within: Context) -> None:
        self._span("queue", within, timeline.received_ns, timeline.admitted_ns)
        for stay in timeline.stays:
            if stay.role == "drafter":
                told = {"consort.drafts": stay.messages, "consort.drafted": stay.tokens}
                self._span("draft", within, stay.began_ns, stay.ended_ns, stay, told)
                continue
            self._span("prefill", within, stay.began_ns, stay.first_ns or stay.ended_ns, stay)
            if stay.first_ns is not None:
                told = {"consort.steps": stay.messages, "consort.tokens": stay.tokens}
                self._span("decode", within, stay.first_ns, stay.last_ns, stay, told)

    def _span(
        self,
        name: str,
        within: Context,
        began_ns: int,
        ended_ns: int | None,
        stay: Stay | None = None,
        told: Mapping[str, int] | None = None,
    ) -> None:
        """A span that is over. ended_ns: None: now."""
        attributes: dict[str, Any] = dict(told or {})
        if stay is not None:
            attributes |= {"consort.role": stay.role, "consort.replica": stay.replica}
        span = self._tracer.start_span(name, within, attributes=attributes, start_time=began_ns)
        span.end(ended_ns)


def _of_request(request: Request) -> dict[str, Any]:
    told = {
        "gen_ai.request.model": request.endpoint.name,
        "gen_ai.request.max_tokens": request.params.max_tokens,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "consort.target": request.endpoint.target,
        "consort.draft_length": request.max_draft_length,
    }
    drafter = request.endpoint.drafter
    return told if drafter is None else told | {"consort.drafter": drafter}


def _of_end(last: Delta) -> dict[str, Any]:
    statistics = last.statistics
    told: dict[str, Any] = {
        "gen_ai.usage.output_tokens": statistics.committed,
        "consort.steps": statistics.steps,
        "consort.drafted": statistics.drafted,
        "consort.accepted": statistics.accepted,
        "consort.rejections": statistics.missed,
        "consort.hits": statistics.hits,
    }
    if last.finish is not None:
        told["gen_ai.response.finish_reasons"] = [last.finish]
    if last.error is not None:
        told["error.type"] = type(last.error).__name__
    return told
