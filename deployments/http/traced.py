"""Gives each request that makes text its span. ASGI middleware, used only where requests are traced."""

from http import HTTPStatus

from opentelemetry.trace import Span, StatusCode, use_span
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http.turnstile import GENERATING_PATHS
from deployments.monitoring.tracing import RequestTracer


class Traced:
    """What it calls runs within the span, whose id the answer's `traceparent` tells."""

    def __init__(self, app: ASGIApp, *, tracer: RequestTracer) -> None:
        self._app, self._tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in GENERATING_PATHS:
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
                await self._app(scope, receive, self._told(span, send))
            except Exception:  # which is answered further out; its text is not for spans
                span.set_status(StatusCode.ERROR)
                raise

    def _told(self, span: Span, send: Send) -> Send:
        """Sends on, with the span's id; the span gets the status."""

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_status(StatusCode.ERROR)
                MutableHeaders(scope=message).update(self._tracer.headers(span))
            await send(message)

        return send_on
