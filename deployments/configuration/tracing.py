"""The configuration of traces. OpenTelemetry reads everything else from the environment."""

from typing import Annotated

from pydantic import Field

from deployments.validation.strict import StrictModel


class TracingConfig(StrictModel):
    """Where traces are sent."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] = Field(
        "http://127.0.0.1:4318",
        description="Base URL of a collector for OTLP over HTTP, without the path `/v1/traces`.",
    )
