"""The configuration of traces. What it leaves open is OpenTelemetry's to read from the environment."""

from typing import Annotated

from pydantic import Field

from deployments.validation.strict import StrictModel


class TracingConfig(StrictModel):
    """Where traces go."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] = Field(
        "http://127.0.0.1:4318", description="A collector's address for OTLP over HTTP, without the path `/v1/traces`."
    )
