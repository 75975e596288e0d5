"""Spans of requests, in memory: what is in them, whose children they are, and what is not in them."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id

from actors.coordinator.request import Delta, Request, Statistics, Timeline
from actors.replica.in_process import Engine
from decoding.errors import ConfigError, UnavailableError
from deployments.admission.bounds import Limits
from deployments.configuration.api_keys import KeyRing, key_of
from deployments.configuration.http import TracingConfig
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.http.routes import make_api
from deployments.monitoring.tracing import RequestTracer
from deployments.monitoring.tracing_setup import make_tracer
from tests.deployments.fake_coordinator import FakeCoordinator

PROMPT, SECRET = "import secretive\n", "open-sesame"
BODY = {"model": "consort", "prompt": PROMPT, "max_tokens": 40, "seed": 3}
TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = {"Authorization": f"Bearer {SECRET}", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider)


def serve(service: Service) -> Iterator[TestClient]:
    keys = KeyRing([key_of(SECRET, field="key", admin=False).api_key("website")])
    with TestClient(make_api(service, keys=keys), headers=CLIENT) as client:
        yield client


@pytest.fixture
def real(engine: Engine, endpoints: dict[str, ServedEndpoint], tracer: RequestTracer) -> Iterator[TestClient]:
    yield from serve(Service(endpoints, engine.coordinator, tracer=tracer))


@pytest.fixture
def made_up(endpoints: dict[str, ServedEndpoint], coordinator: Any, tracer: RequestTracer) -> Iterator[TestClient]:
    yield from serve(Service(endpoints, coordinator, tracer=tracer, limits=Limits(max_requests=2)))


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return format_span_id(span.parent.span_id)


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return format_span_id(span.context.span_id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_told_from_its_receipt_to_its_end(
    real: TestClient, exporter: InMemorySpanExporter, stream: bool
) -> None:
    reply = real.post("/v1/completions", json={**BODY, "stream": stream, "n": 2})
    assert reply.status_code == 200, reply.text
    spans = exporter.get_finished_spans()
    assert {format_trace_id(span.context.trace_id) for span in spans if span.context} == {TRACE}
    (root,) = named(spans, "POST /v1/completions")
    assert parent_of(root) == "b7ad6b7169203331"
    assert reply.headers["traceparent"] == f"00-{TRACE}-{id_of(root)}-01"
    attributes = root.attributes or {}
    assert (attributes["http.response.status_code"], attributes["consort.api_key"]) == (200, "website")
    assert attributes["consort.request_id"] == reply.headers["X-Request-Id"]
    requests = named(spans, "request")
    assert [parent_of(span) for span in requests] == [id_of(root)] * 2
    for request in requests:
        check_children(request, [span for span in spans if span.parent and parent_of(span) == id_of(request)])


def check_children(request: ReadableSpan, children: list[ReadableSpan]) -> None:
    attributes = request.attributes or {}
    assert (attributes["gen_ai.usage.output_tokens"], attributes["gen_ai.response.finish_reasons"]) == (40, ("length",))
    (queue,), (prefill,), (decode,), drafts = (
        named(children, name) for name in ("queue", "prefill", "decode", "draft")
    )
    times = [request.start_time, queue.start_time, queue.end_time, prefill.start_time, prefill.end_time]
    times += [decode.start_time, decode.end_time, request.end_time]
    assert times == sorted(times, key=lambda start: start or 0)
    assert prefill.end_time == decode.start_time
    of_target = decode.attributes or {}
    assert (of_target["consort.tokens"], of_target["consort.steps"]) == (40, attributes["consort.steps"])
    assert of_target["consort.replica"] == "target"
    assert {(draft.attributes or {})["consort.replica"] for draft in drafts} == {"drafter"}
    assert len(drafts) == 1


def test_nothing_of_prompts_answers_and_secrets_is_in_spans(real: TestClient, exporter: InMemorySpanExporter) -> None:
    reply = real.post("/v1/completions", json=BODY)
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["text"]
    real.post("/v1/completions", json={**BODY, "prompt": ["secretive", [10**9]]})  # refused
    exported = " ".join(span.to_json() for span in exporter.get_finished_spans())
    assert len(exporter.get_finished_spans()) >= 6
    assert "secretive" not in exported
    assert SECRET not in exported
    assert json.dumps(text)[1:-1] not in exported


def test_other_routes_and_strangers_have_no_spans(made_up: TestClient, exporter: InMemorySpanExporter) -> None:
    assert made_up.get("/v1/models").status_code == 200
    assert made_up.post("/v1/completions", json=BODY, headers={"Authorization": "Bearer x"}).status_code == 401
    assert exporter.get_finished_spans() == ()


def test_what_clients_do_not_sample_keeps_no_journal(
    made_up: TestClient, exporter: InMemorySpanExporter, coordinator: FakeCoordinator
) -> None:
    made_up.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"})
    made_up.post("/v1/completions", json=BODY, headers={"traceparent": "nonsense"})
    assert [request.timeline is None for request in coordinator.requests] == [True, False]
    roots = [span for span in exporter.get_finished_spans() if span.parent is None]
    assert [span.name for span in roots] == ["POST /v1/completions"]


def test_failures_are_told_without_their_text(
    made_up: TestClient, exporter: InMemorySpanExporter, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: Request, sink: Any) -> None:
        if not coordinator.requests:  # the first one; nothing comes of the other
            sink(Delta("", (), Statistics(), error=UnavailableError("of secretive things")))
        coordinator.requests.append(request)

    monkeypatch.setattr(coordinator, "submit", fail)
    assert made_up.post("/v1/completions", json={**BODY, "n": 2}).status_code == 503
    failed, given_up = named(exporter.get_finished_spans(), "request")
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "UnavailableError")
    assert (given_up.attributes or {})["consort.end"] == "cancelled"
    (root,) = named(exporter.get_finished_spans(), "POST /v1/completions")
    assert root.status.status_code == StatusCode.ERROR


def test_a_journal_follows_moves() -> None:
    timeline = Timeline()
    timeline.record_tokens("target", 1)  # of nobody
    timeline.move("target", "a")
    timeline.record_tokens("target", 3)
    timeline.record_tokens("target", 2)
    timeline.move("target", None)
    timeline.move("target", "b")
    timeline.move("drafter", "c")
    first, second, drafter = timeline.stays
    assert (first.replica, first.messages, first.tokens) == ("a", 2, 5)
    assert first.ended_ns is not None
    assert second.first_ns is second.ended_ns is drafter.ended_ns is None


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_tracer(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for tracer in (make_tracer(None), make_tracer(TracingConfig())):
        assert tracer is not None
        tracer.shut_down()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert make_tracer(TracingConfig()) is None


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deployments.monitoring.tracing", None)
    with pytest.raises(ConfigError, match=r"http\.tracing: .*pip install 'consort\[tracing\]'"):
        make_tracer(TracingConfig())
