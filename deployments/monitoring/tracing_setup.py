"""Set up tracing if the configuration or the environment asks for it. Imports OpenTelemetry only then."""

import logging
import os
from typing import TYPE_CHECKING

from decoding.errors import ConfigError
from deployments.configuration.http import TracingConfig

if TYPE_CHECKING:
    from deployments.monitoring.tracing import RequestTracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_MISSING = "needs OpenTelemetry: pip install 'consort[tracing]'"
_logger = logging.getLogger(__name__)


def make_tracer(config: TracingConfig | None) -> "RequestTracer | None":
    """Return a tracer, or None if tracing is off. config: None if OpenTelemetry's environment variables decide.

    Raises ConfigError if tracing is configured, but OpenTelemetry is not installed.
    """
    switches = ("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")
    is_off = any(os.environ.get(name, "").strip().lower() == value for name, value in switches)
    if is_off or (config is None and not any(map(os.environ.get, _ENDPOINTS))):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from deployments.monitoring.tracing import RequestTracer, make_provider
    except ImportError as error:
        if config is not None:
            raise ConfigError(f"http.tracing: {_MISSING}") from error
        _logger.warning("the environment asks for tracing, but it is off: it %s", _MISSING)
        return None
    url = None if config is None else config.endpoint.rstrip("/") + "/v1/traces"
    return RequestTracer(make_provider(OTLPSpanExporter(endpoint=url)))
