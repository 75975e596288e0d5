"""The bounds of the server and of its API keys, and what counts against them."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from deployments.admission.fair_queue import Ticket
from deployments.admission.key_bounds import KeyRates, Reached, Use, reached_at_once
from deployments.admission.key_ledger import SharedLimits
from deployments.configuration.api_keys import ApiKey
from deployments.configuration.config import ServerConfig
from deployments.configuration.model import ModelConfig
from engine.loading.host import free_host_bytes

READY = 2  # requests beyond the slots, so that no slot stays empty between two requests
_MOST_SLOTS = 64  # of a replica whose slots are `auto`
_LEAST_BOUND = 256  # least default of max_requests …
_MOST_BOUND = 8192  # … and the most that memory gives; Serve passes 10,000 on to a coordinator
_BYTES_PER_REQUEST = 2**23  # of free memory, so that waiting requests take a few percent of it


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of accepted requests; more are refused."""

    max_requests: int = 256  # in progress or waiting
    max_tokens: int | None = None  # prompts and answers together
    # By target: requests that may run, more if its replicas have more slots. Targets not listed: any number.
    running: Mapping[str, int] = field(default_factory=dict)
    max_queue_wait_s: float | None = math.inf  # predicted; 0 or None: half the time of an answer


def limits_of(config: ServerConfig) -> Limits:
    """Limits of a configuration and of this machine's free memory. A few more requests run than targets have slots."""
    targets = {name: config.models[name] for endpoint in config.endpoints.values() for name in endpoint.answering}
    running = {name: _slots(model) * model.replicas + READY for name, model in targets.items()}
    replicas = {name: max(model.replicas, model.scaling.max if model.scaling else 0) for name, model in targets.items()}
    most = sum(_slots(model) * replicas[name] for name, model in targets.items())
    fitting = min(free_host_bytes() // _BYTES_PER_REQUEST, _MOST_BOUND)
    max_requests = config.http.max_requests or max(_LEAST_BOUND, 2 * most, fitting)
    return Limits(max_requests, config.http.max_tokens, running, config.http.max_queue_wait_s)


def _slots(model: ModelConfig) -> int:
    return _MOST_SLOTS if model.slots == "auto" else model.slots


class Bounds:
    """What requests in progress at one coordinator leave for new ones."""

    def __init__(self, limits: Limits, shared: SharedLimits | None) -> None:
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
            reason = f"{limits.max_requests} requests are in progress already (http.max_requests)."
            return Reached("max_requests", reason)
        if limits.max_tokens is not None and self._total.tokens + new.tokens > limits.max_tokens:
            reason = f"with {new.tokens} more, the tokens in progress would exceed {limits.max_tokens}"
            return Reached("max_tokens", f"{reason} (http.max_tokens).")
        own = self._own(key)
        reached = reached_at_once(own, self._use_of(key), new)
        return self._rates_of(own).reached(new, now_s) if reached is None and rates else reached

    def most_requests(self, key: ApiKey) -> int:
        """Return how many more requests the key may have in progress, whatever their tokens."""
        most, own = self._limits.max_requests - self._total.requests - self._held.total(), self._own(key)
        return most if own.max_requests is None else min(most, own.max_requests - self._use_of(key).requests)

    @property
    def holders(self) -> Collection[ApiKey]:
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
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1

    def take(self, key: ApiKey, use: Use, now_s: float) -> None:
        if key.is_limited:
            self._rates_of(self._own(key)).take(use, now_s)

    def give_back(self, key: ApiKey, unused: Use, now_s: float) -> None:
        """Return to the key's minute what was taken and not used, here and at other coordinators."""
        self.take(key, -unused, now_s)
        if self._shared is not None:
            self._shared.begin(key, -unused)

    def _own(self, key: ApiKey) -> ApiKey:
        return key if self._shared is None else self._shared.part_of(key)

    def _use_of(self, key: ApiKey) -> Use:
        return self._uses.get(key, Use()) + Use(self._held[key])

    def _limited_uses(self) -> dict[str, Use]:
        """Return what is in progress here, by the names of the keys that have limits."""
        keys = {*self._uses, *self._held}
        return {key.name: self._use_of(key) for key in keys if key.is_limited}

    def _rates_of(self, own: ApiKey) -> KeyRates:
        if own not in self._rates:
            self._rates[own] = KeyRates(own)
        return self._rates[own]
