"""The HTTP interface: address, limits, certificate, traces and API keys."""

import ssl
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from decoding.errors import ConfigError
from decoding.sampling.params import MAX_LOGPROBS
from deployments.configuration.api_keys import ApiKeyConfig, KeyRing
from deployments.configuration.paths import expanded
from deployments.configuration.values import Count, Name
from deployments.fields.loopback import is_loopback
from deployments.fields.strict import MAX_BODY_BYTES, StrictModel

_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


def _check_host(host: str) -> str:
    if "/" in host or host.count(":") == 1:
        raise PydanticCustomError("host", "should be an address alone, such as 0.0.0.0 (the port has a key of its own)")
    return host


class TracingConfig(StrictModel):
    """Where traces are sent."""

    endpoint: Annotated[str, Field(pattern=r"^https?://")] = Field(
        "http://127.0.0.1:4318",
        description="Base URL of a collector for OTLP over HTTP, without the path `/v1/traces`.",
    )


class TlsConfig(StrictModel):
    """A certificate with its key, in files on every node that listens."""

    certificate: str = Field(description="The certificate with those between it and its root, in PEM.")
    key: str = Field(description="Its private key, in PEM, without a password.")

    def anchored(self, folder: Path) -> "TlsConfig":
        """Return it with absolute paths; raises ConfigError if the files can't be used together. folder: their base."""
        paths = {name: str((folder / expanded(path, key=f"http.tls.{name}")).absolute()) for name, path in self}
        for name, path in paths.items():
            if not Path(path).is_file():
                raise ConfigError(f"http.tls.{name}: there is no file {path}")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(paths["certificate"], paths["key"])
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"http.tls: the certificate and the key can't be used together: {error}") from error
        return TlsConfig(**paths)

    def client_context(self) -> ssl.SSLContext:
        """Return a context in which clients on this machine trust this certificate alone, by whatever name."""
        context = ssl.create_default_context(cafile=self.certificate)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


class HttpConfig(StrictModel):
    """Address, limits and API keys of the server."""

    host: Annotated[str, Field(min_length=1), AfterValidator(_check_host)] = Field(
        "127.0.0.1", description="Address to listen on."
    )
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="Port of Ray's metrics, the replicas' own among them, under `consort serve`; null: none are "
        "collected. A cluster has its own.",
    )
    max_requests: Count | None = Field(
        None,
        description="Requests in progress or waiting at once; further ones are refused with 429. null: one for every "
        "8 MiB of memory that is free at the start, but at least 256 and twice as many as all targets have slots "
        "(`auto` counts as 64).",
    )
    max_tokens: Count | None = Field(
        None, description="Tokens of these requests: prompts plus the longest possible answers; null: no limit."
    )
    max_queue_wait_s: Annotated[float, Field(ge=0)] | None = Field(
        60.0,
        description="Longest predicted wait in the queue, in seconds; longer ones are refused with 429. 0 or null: "
        "half the recent duration of an answer, but at least 1 s.",
    )
    cached_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Tokens, of prompts and answers, that the cache for repeated greedy and seeded requests holds; a "
        "log-probability counts as one.",
    )
    max_body_bytes: Count = Field(
        MAX_BODY_BYTES,
        description="The largest body of a request; larger ones get 413. It may contain one JSON value for every 32 "
        "of these bytes.",
    )
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = Field(
        20, description="Most top tokens per position whose log-probabilities a request may ask for; up to 100."
    )
    drain_s: float = Field(
        120, ge=0, description="Seconds that requests in progress get to end when the server or a coordinator stops."
    )
    standby: bool | None = Field(
        None,
        description="Whether `consort serve` starts a second coordinator, which takes half a GiB and goes on when the "
        "first dies. null: on machines with 2 cores or more, if 4 GiB are free once models are loaded. With "
        "`--address` only if true. Serve files set `num_replicas` of `Coordinator` instead.",
    )
    access_log: bool = Field(
        False, description="Log a JSON line per request, without its content; those that the proxy refuses share lines."
    )
    cors_origins: list[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s*]+)$")]] | None = Field(
        None,
        description='Web pages that may use the server from a browser, such as `https://chat.example.org`; `["*"]`: '
        "all, `[]`: none but its own. null: pages from this machine (`localhost`, `127.0.0.1`, `[::1]`).",
    )
    allowed_hosts: list[Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[^:/\s]+)$")]] | None = Field(
        None,
        description="Names, without ports, by which clients may ask for the server, beside this machine's own; others "
        "get 421. null: any; but none for a `consort serve` that listens for this machine alone and needs no key.",
    )
    tls: TlsConfig | None = Field(
        None, description="The certificate with which `consort serve` speaks HTTPS; null: plain HTTP."
    )
    tracing: TracingConfig | None = Field(
        None, description="Traces through OpenTelemetry; null: only if its environment variables ask for them."
    )
    api_keys: dict[Name, ApiKeyConfig] = Field(
        default_factory=dict,
        description="Keys of clients, by a name for logs and metrics; without keys, anybody may send requests.",
    )

    def add_key(self, name: str, key: ApiKeyConfig) -> None:
        if name in self.api_keys:
            raise ConfigError(f"http.api_keys.{name}: another key has this name; choose another name")
        self.api_keys[name] = key

    def key_ring(self) -> KeyRing:
        return KeyRing(key.api_key(name) for name, key in self.api_keys.items())

    def guarded(self, *, insecure: bool = False) -> "HttpConfig":
        """Return the configuration for a server that listens by itself, not behind Serve's own configuration.

        Raises ConfigError if other machines can reach it and it needs no key, unless `insecure` lets anybody ask.
        """
        if self.api_keys or insecure:
            return self
        if not is_loopback(self.host):
            raise ConfigError(
                f"http.host: other machines can reach {self.host}, and there are no API keys. Set CONSORT_API_KEY or "
                "http.api_keys; or let anybody in, with --insecure"
            )
        return self if self.allowed_hosts is not None else self.model_copy(update={"allowed_hosts": []})

    @property
    def host_names(self) -> list[str] | None:
        """Names by which the server may be asked: those that are allowed, and this machine's. None: any."""
        if self.allowed_hosts is None:
            return None
        own = f"[{self.host}]" if ":" in self.host else self.host
        return [*_LOCAL_NAMES, own, *self.allowed_hosts]

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
