"""Limits of API keys that hold for several coordinators together. Each settles with the ledger about every second.

It says all that it has in progress, so lost messages and deaths need no repair. Without the ledger it takes its part.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deployments.admission.key_bounds import KeyRates, Reached, Use, reached_at_once
from deployments.configuration.api_keys import ApiKey

_SILENCE_S = 5.0  # after which a coordinator counts as dead, and its requests as ended
_PERIOD_S = 1.0  # between a coordinator's accounts without anything to ask
_PATIENCE_S = 0.5  # for the ledger's answer
_NOTHING = Use()


@dataclass(frozen=True, slots=True)
class Ask:
    """Requests of a key, named, that may begin together or not at all."""

    key: str
    new: Use


@dataclass(frozen=True, slots=True)
class Account:
    """A coordinator's report. Uses are by the names of the keys that have limits."""

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
        self._keys = {key.name: key for key in keys}
        self._rates = {name: KeyRates(key) for name, key in self._keys.items()}
        self._in_progress: dict[str, dict[str, Use]] = {}  # by coordinator, by key
        self._heard_s: dict[str, float] = {}
        self._clock = clock

    async def settle(self, account: Account) -> Settlement:
        """Enter a coordinator's account, and answer what it asks. Unknown keys have no limits.

        A coroutine that awaits nothing, because Serve runs other methods in several threads at once.
        """
        now_s = self._clock()
        self._heard_s[account.coordinator] = now_s
        self._in_progress[account.coordinator] = dict(account.in_progress)
        for name in [name for name, heard_s in self._heard_s.items() if now_s - heard_s > _SILENCE_S]:
            del self._heard_s[name], self._in_progress[name]
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


class SharedLimits:
    """One coordinator's side. Asks are sent together, one account at a time. Runs in one event loop."""

    def __init__(self, coordinator: str, settle: Callable[[Account], Awaitable[Settlement]]) -> None:
        self._coordinator, self._settle = coordinator, settle
        self._in_progress: Callable[[], Mapping[str, Use]] = dict
        self._begun, self._granted = defaultdict[str, Use](Use), defaultdict[str, Use](Use)
        self._asks: list[tuple[Ask, asyncio.Future[Reached | None]]] = []
        self._wake = asyncio.Event()
        self._coordinators, self._is_apart = 1, False

    def attach(self, in_progress: Callable[[], Mapping[str, Use]]) -> None:
        """in_progress: returns what the keys with limits have in progress at this coordinator."""
        self._in_progress = in_progress

    def part_of(self, key: ApiKey) -> ApiKey:
        """Return the key with the limits that this coordinator may use: the full ones while the ledger answers."""
        return key.share(self._coordinators) if self._is_apart else key

    @asynccontextmanager
    async def reserve(self, key: ApiKey, new: Use) -> AsyncIterator[None]:
        """Ask the ledger for new requests, which begin within the block. Raises OverloadedError if it refuses them."""
        if self._is_apart:
            self._begun[key.name] += new
        else:
            future: asyncio.Future[Reached | None] = asyncio.get_running_loop().create_future()
            self._asks.append((Ask(key.name, new), future))
            self._wake.set()
            if (refusal := await future) is not None:
                raise refusal.error()
        self._granted[key.name] += new
        try:
            yield
        except BaseException:
            self.begin(key, -new)  # they did not begin
            raise
        finally:
            self._granted[key.name] += -new

    def begin(self, key: ApiKey, use: Use) -> None:
        """Count requests that begin without being asked for, or give back what was not needed."""
        if key.is_limited:
            self._begun[key.name] += use
            self._wake.set()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _PERIOD_S)
            self._wake.clear()
            await self.settle()
            if self._is_apart:
                await asyncio.sleep(_PERIOD_S)

    async def settle(self) -> None:
        """Send one account, and hand the answers to those who wait for them."""
        asks, self._asks = self._asks, []
        begun, self._begun = self._begun, defaultdict(Use)
        in_progress = defaultdict[str, Use](Use, self._in_progress())
        for name, use in self._granted.items():
            in_progress[name] += use
        account = Account(self._coordinator, dict(in_progress), dict(begun), [ask for ask, _ in asks])
        try:
            answer = await asyncio.wait_for(self._settle(account), _PATIENCE_S)
        except Exception:  # Ray's are many; the ledger is gone or late
            self._is_apart = True
            for name, use in begun.items():
                self._begun[name] += use
            refusals: list[Reached | None] = [None] * len(asks)  # the coordinator's own part decides
        else:
            self._is_apart, self._coordinators = False, answer.coordinators
            refusals = list(answer.refusals)
        for (ask, future), refusal in zip(asks, refusals, strict=True):
            if not future.done():
                future.set_result(refusal)
            elif refusal is None and not self._is_apart:  # nobody waits any more
                self._begun[ask.key] += -ask.new
