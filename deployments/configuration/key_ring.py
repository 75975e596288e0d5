"""API keys: who may ask, and how much of the server each may take. Knows nothing of HTTP."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiKey:
    """Who asks. The secret itself is not kept."""

    name: str
    digest: bytes = b""  # of the secret
    weight: float = 1.0  # its share where several keys compete
    max_requests: int | None = None  # in progress or waiting at once; None: as many as there may be in all
    max_tokens: int | None = None  # of their prompts and answers together
    admin: bool = False  # whether it may change the server, too


ANYBODY = ApiKey("anybody", admin=True)


class KeyRing:
    """All keys. Without any, anybody may ask."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = list(keys)

    def find(self, authorization: str | None) -> ApiKey | None:
        """The key in an Authorization header, if it is one of ours. Takes the same time for any wrong secret."""
        if not self._keys:
            return ANYBODY
        scheme, _, secret = (authorization or "").partition(" ")
        given = digest_of(secret.strip() if scheme.lower() == "bearer" else "")
        matches = [key for key in self._keys if hmac.compare_digest(key.digest, given)]
        return matches[0] if matches else None


def digest_of(secret: str) -> bytes:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).digest()
