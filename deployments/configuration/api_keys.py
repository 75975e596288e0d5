"""API keys with their limits. Only digests of their secrets are kept."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, SecretStr, model_validator

from decoding.errors import ConfigError
from deployments.configuration.paths import expanded
from deployments.configuration.values import Count
from deployments.fields.strict import StrictModel, wrong_field

ENVIRONMENT_KEY = "CONSORT_API_KEY"

_LIMITS = ("max_requests", "max_tokens", "requests_per_minute", "tokens_per_minute")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key. The secret itself is not kept."""

    name: str
    digest: bytes = b""  # SHA-256 of the secret
    weight: float = 1.0  # its share when keys compete
    max_requests: int | None = None  # in progress or waiting at once; None: no limit of its own
    max_tokens: int | None = None  # prompts and answers of these requests together
    requests_per_minute: int | None = None  # that begin; None: any number
    tokens_per_minute: int | None = None  # prompts and answers of these
    admin: bool = False  # whether it may scale models and load adapters
    weights: bool = False  # whether it may replace the weights of models
    private_cache: bool = False  # whether its requests share cached text with each other only

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) is not None for name in _LIMITS)

    def share(self, parts: int) -> "ApiKey":
        """Return the key with an equal part of each limit, at least 1."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return replace(self, **{name: max(1, limit // parts) for name, limit in limits.items() if limit is not None})

    def cache_salt(self, given: str | None) -> str:
        """Return the salt of a request's cached text. given: the client's."""
        if self.private_cache:
            return f"key {self.name}: {given or ''}"
        return f"salt: {given}" if given else ""


ANYBODY = ApiKey("anybody", admin=True)


class KeyRing:
    """All keys. Without keys, anybody may send requests."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = list(keys)

    @property
    def digests(self) -> list[bytes]:
        return [key.digest for key in self._keys]

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key in an Authorization header, or None. Takes the same time for any wrong secret."""
        if not self._keys:
            return ANYBODY
        given = secret_digest(authorization)
        matches = [key for key in self._keys if hmac.compare_digest(key.digest, given)]
        return matches[0] if matches else None


def secret_digest(authorization: str | None) -> bytes:
    """Return the digest of the secret in an Authorization header; without one, of an empty secret."""
    scheme, _, secret = (authorization or "").partition(" ")
    return digest_of(secret.strip() if scheme.lower() == "bearer" else "")


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 digest that stands for a secret."""
    return hashlib.sha256(secret.encode()).digest()


class ApiKeyConfig(StrictModel):
    """A client's key: the secret itself, an environment variable or a file that has it, or its digest."""

    key: SecretStr | None = Field(None, description="The secret itself.")
    env: str | None = Field(None, description="An environment variable that has the secret.")
    file: str | None = Field(None, description="A file that has the secret, relative to the configuration's folder.")
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = Field(
        None, description="The SHA-256 of the secret, 64 hexadecimal digits, which need not be kept secret."
    )
    weight: float = Field(1.0, gt=0, description="Its share when keys compete.")
    max_requests: Count | None = Field(
        None, description="Its requests in progress or waiting at once; null: no limit of its own."
    )
    max_tokens: Count | None = Field(
        None,
        description="Tokens of these requests: prompts plus the longest possible answers; null: no limit of its own.",
    )
    requests_per_minute: Count | None = Field(
        None, description="Its requests that may begin in a minute, each of `n` answers counted; null: any number."
    )
    tokens_per_minute: Count | None = Field(
        None,
        description="Tokens of these requests: prompts plus the longest possible answers, of which the part that an "
        "answer did not need is given back at its end; null: any number.",
    )
    admin: bool = Field(False, description="Whether it may also scale models and load adapters.")
    weights: bool = Field(
        False, description="Whether it may also replace the weights of models with `weights_at_run_time`."
    )
    private_cache: bool = Field(
        False, description="Whether its requests share cached prompts and answers with each other only."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ApiKeyConfig":
        if sum(source is not None for source in (self.key, self.env, self.file, self.sha256)) != 1:
            raise wrong_field("key", "should be set, or else env, file or sha256, and only one of them")
        return self

    def digested(self, name: str, folder: Path) -> "ApiKeyConfig":
        """Return the key with a digest in place of the secret; raises ConfigError without one that clients can send."""
        if self.sha256 is not None:
            return self
        if self.key is not None:
            secret, source, missing = self.key.get_secret_value(), "key", "is empty"
        elif self.env is not None:
            secret, source, missing = os.environ.get(self.env, ""), "env", f"the environment has no {self.env}"
        else:
            assert self.file is not None
            path = folder / expanded(self.file, key=f"http.api_keys.{name}.file")
            secret, source, missing = "", "file", f"there is no secret in {self.file!r}"
            with suppress(OSError, UnicodeDecodeError):
                secret = path.read_text(encoding="utf-8")
        digest = _digest(secret, field=f"http.api_keys.{name}.{source}", missing=missing)
        return self.model_copy(update={"key": None, "env": None, "file": None, "sha256": digest})

    def api_key(self, name: str) -> ApiKey:
        """Return the key as the server checks it. The secret must have been digested."""
        assert self.sha256 is not None
        return ApiKey(name, bytes.fromhex(self.sha256), **self.model_dump(exclude={"key", "env", "file", "sha256"}))


def key_of(secret: str, *, field: str, admin: bool) -> ApiKeyConfig:
    """Return a key without limits; raises ConfigError if clients can't send it. field: where it was given."""
    missing = "is empty; leave it out to serve anybody"
    return ApiKeyConfig(sha256=_digest(secret, field=field, missing=missing), admin=admin)


def environment_key() -> ApiKeyConfig | None:
    """Return the admin key in CONSORT_API_KEY; None if it is not set. Raises ConfigError if it is empty."""
    secret = os.environ.get(ENVIRONMENT_KEY)
    return None if secret is None else key_of(secret, field=ENVIRONMENT_KEY, admin=True)


def _digest(secret: str, *, field: str, missing: str) -> str:
    """Return the digest in hexadecimal digits. White space around the secret, from files and shells, is ignored."""
    secret = secret.strip()
    if not secret:
        raise ConfigError(f"{field}: {missing}")
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{field}: has characters that clients can't send; take printable ASCII")
    return digest_of(secret).hex()
