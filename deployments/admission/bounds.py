"""The bounds of the server and of its API keys, and what counts against them. Knows no queue and no clock."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from deployments.admission.key_bounds import KeyRates, Reached, Use, reached_at_once
from deployments.admission.limits import Limits
from deployments.admission.shared_limits import SharedLimits
from deployments.admission.ticket import Ticket
from deployments.configuration.api_keys import ApiKey


class Bounds:
    """What requests in progress at one coordinator leave for new ones."""

    def __init__(self, limits: Limits, shared: SharedLimits | None) -> None:
        """shared: limits of keys that hold for other coordinators, too; None: there are no others."""
        self._limits, self._shared = limits, shared
        self._total, self._uses = Use(), defaultdict[ApiKey, Use](Use)  # of all tickets, and of each key's
        self._held = Counter[ApiKey]()  # requests that need no model
        self._rates: dict[ApiKey, KeyRates] = {}
        if shared is not None:
            shared.attach(self._limited_uses)

    def reached(self, new: Use, key: ApiKey, now_s: float, *, rates: bool = True) -> Reached | None:
        """Return the bound that new requests would exceed; None: no bound. rates: whether those of a minute count."""
        limits = self._limits
        if self._total.requests + self._held.total() + new.requests > limits.max_requests:
            return Reached(
                "max_requests", f"{limits.max_requests} requests are in progress already (http.max_requests)."
            )
        if limits.max_tokens is not None and self._total.tokens + new.tokens > limits.max_tokens:
            reason = (
                f"with {new.tokens} more, the tokens in progress would exceed {limits.max_tokens} (http.max_tokens)."
            )
            return Reached("max_tokens", reason)
        own = key if self._shared is None else self._shared.part_of(key)
        if key.max_requests is not None or key.max_tokens is not None:
            reached = reached_at_once(own, self._use_of(key), new)
            if reached is not None:
                return reached
        return self._rates_of(key).reached(new, now_s) if rates else None

    def most_requests(self, key: ApiKey) -> int:
        """Return how many more requests the key may have in progress, whatever their tokens."""
        most = self._limits.max_requests - self._total.requests - self._held.total()
        own = key if self._shared is None else self._shared.part_of(key)
        return most if own.max_requests is None else min(most, own.max_requests - self._use_of(key).requests)

    @property
    def holders(self) -> Collection[ApiKey]:
        """Keys of the tickets."""
        return self._uses.keys()

    def count(self, ticket: Ticket, times: int) -> None:
        """Count a ticket that waits or runs from now on, or, with −1, no longer."""
        use = Use(times, times * ticket.tokens)
        self._total += use
        self._uses[ticket.key] += use
        if not self._uses[ticket.key].requests:
            del self._uses[ticket.key]

    @contextmanager
    def hold(self, key: ApiKey) -> Iterator[None]:
        """Count a request that needs no model as in progress."""
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1

    def take(self, key: ApiKey, use: Use, now_s: float) -> None:
        """Count what begins in the key's minute."""
        if key.is_limited:
            self._rates_of(key).take(use, now_s)

    def give_back(self, key: ApiKey, unused: Use, now_s: float) -> None:
        """Return to the key's minute what was taken and not used, here and at other coordinators."""
        self.take(key, -unused, now_s)
        if self._shared is not None:
            self._shared.begin(key, -unused)

    def _use_of(self, key: ApiKey) -> Use:
        """Return what the key has in progress here."""
        return self._uses.get(key, Use()) + Use(self._held[key])

    def _limited_uses(self) -> dict[str, Use]:
        """Return what is in progress here, by the names of the keys that have limits."""
        keys = {*self._uses, *self._held}
        return {key.name: self._use_of(key) for key in keys if key.is_limited}

    def _rates_of(self, key: ApiKey) -> KeyRates:
        own = key if self._shared is None else self._shared.part_of(key)
        if own not in self._rates:
            self._rates[own] = KeyRates(own)
        return self._rates[own]
