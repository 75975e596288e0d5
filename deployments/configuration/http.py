"""The configuration of the HTTP interface: where to listen, whom to let in, how much to take on."""

from typing import Annotated

from pydantic import Field

from decoding.errors import ConfigError
from decoding.sampling.params import MAX_LOGPROBS
from deployments.configuration.key_ring import KeyRing
from deployments.configuration.keys import ApiKeyConfig
from deployments.configuration.model import Count
from deployments.configuration.names import Name
from deployments.configuration.tracing import TracingConfig
from deployments.requests.json_body import MAX_BODY_BYTES
from deployments.validation.strict import StrictModel


class HttpConfig(StrictModel):
    """Where to listen, and how much to take on."""

    host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="Port to listen on.")
    max_requests: Count | None = Field(
        None,
        description="Requests in progress or waiting at once; those beyond are refused with 429. null: twice as many "
        "as all targets have slots, but at least 256.",
    )
    max_tokens: Count | None = Field(
        None, description="Tokens of their prompts and answers together, as far as they may get; null: any."
    )
    max_queue_wait_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Predicted seconds in the queue beyond which a request is refused with 429; null: half "
        "as long as an answer takes lately, but at least 1.",
    )
    cached_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Keep answers of so many tokens, prompts included, for greedy and seeded requests that come again.",
    )
    max_body_bytes: Count = Field(
        MAX_BODY_BYTES,
        description="The largest body of a request; larger ones get 413. It may have a number, a text or another JSON "
        "value for every 32 of these bytes.",
    )
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = Field(
        20, description="Of how many most probable tokens a request may ask the log-probabilities; up to 100."
    )
    max_logprobs_per_request: Count = Field(
        500_000,
        description="The most log-probabilities that all answers to a request, and its prompts, may have together.",
    )
    access_log: bool = Field(False, description="Log a line of JSON for every request, without its content.")
    tracing: TracingConfig | None = Field(
        None, description="Traces through OpenTelemetry; null: only if its environment variables ask for them."
    )
    api_keys: dict[Name, ApiKeyConfig] = Field(
        default_factory=dict, description="Who may ask, by a name for logs and metrics; without keys, anybody."
    )

    def add_key(self, name: str, key: ApiKeyConfig) -> None:
        """Let one more key in. Raises ConfigError if there is one of that name."""
        if name in self.api_keys:
            raise ConfigError(f"http.api_keys.{name}: the name is taken by a key from elsewhere; choose another")
        self.api_keys[name] = key

    def key_ring(self) -> KeyRing:
        """Who may ask. The secrets must have been digested."""
        return KeyRing(key.api_key(name) for name, key in self.api_keys.items())

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
