"""API keys with their limits. Must not know HTTP."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    private_cache: bool = False  # whether its requests share cached text with each other only

    @property
    def is_limited(self) -> bool:
        """Whether it has any limit of its own."""
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
        """Return the digests of all keys' secrets."""
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
