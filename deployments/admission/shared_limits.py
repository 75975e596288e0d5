"""One coordinator's dealings with the ledger that all coordinators share. Runs in one event loop; knows no Ray.

While the ledger does not answer, each coordinator takes an equal part of every limit.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from deployments.admission.key_bounds import Reached, Use
from deployments.admission.key_ledger import Account, Ask, Settlement
from deployments.configuration.api_keys import ApiKey

_PERIOD_S = 1.0  # between accounts without anything to ask
_PATIENCE_S = 0.5  # for the ledger's answer

Settle = Callable[[Account], Awaitable[Settlement]]
_Waiting = list[tuple[Ask, asyncio.Future[Reached | None]]]


class SharedLimits:
    """The limits of API keys across coordinators. Asks are sent together, one account at a time."""

    def __init__(self, coordinator: str, settle: Settle) -> None:
        """settle: sends an account to the ledger. May raise anything."""
        self._coordinator, self._settle = coordinator, settle
        self._in_progress: Callable[[], Mapping[str, Use]] = dict
        self._begun, self._granted = defaultdict[str, Use](Use), defaultdict[str, Use](Use)
        self._asks: _Waiting = []
        self._wake = asyncio.Event()
        self._coordinators, self._is_apart = 1, False

    def attach(self, in_progress: Callable[[], Mapping[str, Use]]) -> None:
        """in_progress: what the keys with limits have in progress at this coordinator."""
        self._in_progress = in_progress

    def part_of(self, key: ApiKey) -> ApiKey:
        """Return the key with the limits that this coordinator may use by itself: all, while the ledger watches."""
        return key.share(self._coordinators) if self._is_apart else key

    @asynccontextmanager
    async def reserve(self, key: ApiKey, new: Use) -> AsyncIterator[None]:
        """Wait for the ledger's word on new requests, which begin within the block.

        Raises:
            OverloadedError: they would exceed a limit of the key.
        """
        await self._ask(key, new)
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
        """Settle for ever."""
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

    async def _ask(self, key: ApiKey, new: Use) -> None:
        if self._is_apart:
            self._begun[key.name] += new
            return
        future: asyncio.Future[Reached | None] = asyncio.get_running_loop().create_future()
        self._asks.append((Ask(key.name, new), future))
        self._wake.set()
        refusal = await future
        if refusal is not None:
            raise refusal.error()
