"""What several coordinators together use of each API key's limits. Must not know Ray, HTTP or an event loop.

A coordinator settles about every second and whenever it has something to ask. Each time it says all that it has in
progress, so a lost message, a new ledger and a coordinator's death need no repair.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from deployments.admission.key_bounds import KeyRates, Reached, Use, reached_at_once
from deployments.configuration.api_keys import ApiKey

_SILENCE_S = 5.0  # after which a coordinator counts as dead, and its requests as ended
_NOTHING = Use()


@dataclass(frozen=True, slots=True)
class Ask:
    """Requests of a key, named, that may begin together or not at all."""

    key: str
    new: Use


@dataclass(frozen=True, slots=True)
class Account:
    """What a coordinator says. Uses are by the names of the keys that have limits."""

    coordinator: str
    in_progress: Mapping[str, Use]  # without what is asked for
    begun: Mapping[str, Use]  # since the last account, without what was asked for
    asks: Sequence[Ask]


@dataclass(frozen=True, slots=True)
class Settlement:
    """The ledger's answer."""

    refusals: Sequence[Reached | None]  # of each ask; None: granted
    coordinators: int  # that are alive


class KeyLedger:
    """The uses of all keys by all coordinators."""

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds; replaced in tests."""
        self._keys = {key.name: key for key in keys}
        self._rates = {name: KeyRates(key) for name, key in self._keys.items()}
        self._in_progress: dict[str, dict[str, Use]] = {}  # by coordinator, by key
        self._heard_s: dict[str, float] = {}
        self._clock = clock

    def settle(self, account: Account) -> Settlement:
        """Enter a coordinator's account, and answer what it asks. Unknown keys have no limits."""
        now_s = self._clock()
        self._heard_s[account.coordinator] = now_s
        self._in_progress[account.coordinator] = dict(account.in_progress)
        self._forget_dead(now_s)
        for name, use in account.begun.items():
            if name in self._rates:
                self._rates[name].take(use, now_s)
        refusals = [self._ask(account.coordinator, ask, now_s) for ask in account.asks]
        return Settlement(refusals, len(self._heard_s))

    def _ask(self, coordinator: str, ask: Ask, now_s: float) -> Reached | None:
        key = self._keys.get(ask.key)
        if key is None:
            return None
        used = sum((uses.get(ask.key, _NOTHING) for uses in self._in_progress.values()), _NOTHING)
        refusal = reached_at_once(key, used, ask.new) or self._rates[ask.key].reached(ask.new, now_s)
        if refusal is None:
            self._rates[ask.key].take(ask.new, now_s)
            own = self._in_progress[coordinator]
            own[ask.key] = own.get(ask.key, _NOTHING) + ask.new
        return refusal

    def _forget_dead(self, now_s: float) -> None:
        for name in [name for name, heard_s in self._heard_s.items() if now_s - heard_s > _SILENCE_S]:
            del self._heard_s[name], self._in_progress[name]
