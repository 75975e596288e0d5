"""The limits of one API key against what it uses."""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from decoding.errors import Bound, OverloadedError
from deployments.configuration.api_keys import ApiKey

_LONGEST_RETRY_S = 60  # OpenAI's clients ignore longer delays and retry at once
_SPREAD = 1.25  # clients that are refused together come again within this factor of the time
_jitter = random.Random()


@dataclass(frozen=True, slots=True)
class Use:
    """Requests and their tokens, prompts and longest possible answers together. Negative numbers give back."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: "Use") -> "Use":
        return Use(self.requests + other.requests, self.tokens + other.tokens)

    def __neg__(self) -> "Use":
        return Use(-self.requests, -self.tokens)


class Reached(NamedTuple):
    """A bound that new requests would exceed."""

    bound: Bound
    reason: str
    wait_s: float = 0.0  # until it would not, whatever the queue

    def error(self, wait_s: float = 0.0) -> OverloadedError:
        """Return the refusal. wait_s: until there should be room in the queue. Each call spreads it differently."""
        spread_s = min(wait_s, _LONGEST_RETRY_S / _SPREAD) * _jitter.uniform(1, _SPREAD)
        retry_s = min(max(1, math.ceil(max(spread_s, self.wait_s))), _LONGEST_RETRY_S)
        return OverloadedError(self.reason, bound=self.bound, retry_after_s=retry_s)


class RateLimit:
    """A budget that fills evenly, up to a minute's worth (a token bucket)."""

    def __init__(self, per_minute: int) -> None:
        self._capacity = float(per_minute)
        self._left, self._at_s = self._capacity, 0.0

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until `amount` may be taken; 0: now. More than a minute's worth goes once it is full."""
        missing = min(amount, self._capacity) - self._filled(now_s)
        return max(missing, 0.0) * 60 / self._capacity

    def take(self, amount: float, now_s: float) -> None:
        """Take an amount, or give it back if it is negative."""
        self._left, self._at_s = min(self._filled(now_s) - amount, self._capacity), now_s

    def _filled(self, now_s: float) -> float:
        return min(self._left + (now_s - self._at_s) * self._capacity / 60, self._capacity)


class KeyRates:
    """What a key may begin in a minute."""

    def __init__(self, key: ApiKey) -> None:
        self._setting = f"http.api_keys.{key.name}"
        self._requests = None if key.requests_per_minute is None else RateLimit(key.requests_per_minute)
        self._tokens = None if key.tokens_per_minute is None else RateLimit(key.tokens_per_minute)

    def reached(self, new: Use, now_s: float) -> Reached | None:
        if self._requests is not None and (wait_s := self._requests.wait_s(new.requests, now_s)):
            reason = "this API key has begun as many requests as it may in a minute"
            reason = f"{reason} ({self._setting}.requests_per_minute)."
            return Reached("key_requests_per_minute", reason, wait_s)
        if self._tokens is not None and (wait_s := self._tokens.wait_s(new.tokens, now_s)):
            reason = f"with {new.tokens} more, this API key would exceed its tokens of a minute"
            return Reached("key_tokens_per_minute", f"{reason} ({self._setting}.tokens_per_minute).", wait_s)
        return None

    def take(self, use: Use, now_s: float) -> None:
        for limit, amount in ((self._requests, use.requests), (self._tokens, use.tokens)):
            if limit is not None:
                limit.take(amount, now_s)


def reached_at_once(key: ApiKey, used: Use, new: Use) -> Reached | None:
    """Return the key's limit of requests in progress that the new ones would exceed; None: none."""
    setting = f"http.api_keys.{key.name}"
    if key.max_requests is not None and used.requests + new.requests > key.max_requests:
        reason = f"this API key has {key.max_requests} requests in progress already ({setting}.max_requests)."
        return Reached("key_max_requests", reason)
    if key.max_tokens is not None and used.tokens + new.tokens > key.max_tokens:
        reason = f"with {new.tokens} more, the tokens that this API key has in progress would exceed {key.max_tokens}"
        return Reached("key_max_tokens", f"{reason} ({setting}.max_tokens).")
    return None
