"""ASGI middleware that gives each request that makes text its span. Used only if tracing is configured."""

from http import HTTPStatus

from opentelemetry.trace import Span, StatusCode, use_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.middleware.paths import GENERATING
from deployments.monitoring.tracing import RequestTracer


class TracingMiddleware:
    """Runs the application within the span and sends the span's id as `traceparent`."""

    def __init__(self, app: ASGIApp, *, tracer: RequestTracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING:
            await self._app(scope, receive, send)
            return
        span = self._tracer.start_server_span(f"POST {scope['path']}", Headers(scope=scope))
        span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": scope["path"],
                "consort.request_id": scope["state"]["request_id"],
                "consort.api_key": scope["state"]["key"].name,
            }
        )
        with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
            try:
                await self._app(scope, receive, self._with_trace_headers(span, send))
            except Exception:  # answered by an outer layer; its text stays out of the span
                span.set_status(StatusCode.ERROR)
                raise

    def _with_trace_headers(self, span: Span, send: Send) -> Send:
        """Wrap send to add the span's id to the headers and the status to the span."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(StatusCode.ERROR)
                MutableHeaders(scope=message).update(self._tracer.headers(span))
            await send(message)

        return send_on
