"""Limits of a key hold for several coordinators together, whatever dies."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from decoding.errors import OverloadedError
from deployments.admission.admission import Admission
from deployments.admission.bounds import Limits
from deployments.admission.key_bounds import Use
from deployments.admission.key_ledger import Account, Ask, KeyLedger, Settlement, SharedLimits
from deployments.configuration.api_keys import ANYBODY, ApiKey
from tests.deployments.admission.test_admission import Backend, nothing, request

FOUR = ApiKey("four", max_requests=4)
SLOW = ApiKey("slow", requests_per_minute=10)
SMALL = ApiKey("small", tokens_per_minute=100)
WIDE = ApiKey("wide", max_tokens=40)
FREE = ApiKey("free", weight=3)


def settle(ledger: KeyLedger, account: Account) -> Settlement:
    return asyncio.run(ledger.settle(account))


def account(name: str, *asks: Ask, held: int = 0, begun: int = 0) -> Account:
    return Account(name, {"four": Use(held, 0)}, {"slow": Use(begun, 0)}, asks)


def test_a_dead_coordinators_requests_no_longer_count() -> None:
    now_s = [0.0]
    ledger = KeyLedger([FOUR], clock=lambda: now_s[0])
    ask = Ask("four", Use(1, 10))
    assert settle(ledger, account("a", held=4)).coordinators == 1
    answer = settle(ledger, account("b", ask))
    assert answer.coordinators == 2
    assert answer.refusals[0] is not None
    now_s[0] = 5.5
    assert settle(ledger, account("b", ask)) == Settlement([None], 1)


def test_a_new_ledger_learns_what_is_in_progress() -> None:
    ledger = KeyLedger([FOUR])
    settle(ledger, account("a", held=3))
    first, second = settle(ledger, account("b", Ask("four", Use(1)), Ask("four", Use(1)))).refusals
    assert first is None
    assert second is not None
    assert second.error().bound == "key_max_requests"


def test_what_began_without_asking_counts_in_the_minute() -> None:
    ledger = KeyLedger([SLOW], clock=lambda: 100.0)
    settle(ledger, account("a", begun=9))
    answers = settle(ledger, account("b", Ask("slow", Use(1)), Ask("slow", Use(1)), Ask("free", Use(99)))).refusals
    assert [refusal is None for refusal in answers] == [True, False, True]


class Coordinators:
    """Admissions of several coordinators with one ledger, settled by the test or by their own tasks."""

    def __init__(self, count: int = 2) -> None:
        self.clock_s = [0.0]
        self.accounts = Counter[str]()
        self.is_up = True
        self.restart()
        self.shared = [SharedLimits(f"c{number}", self._settle) for number in range(count)]
        limits = Limits(running={"target": 100}, max_requests=1000)
        self.admissions = [Admission(Backend(), limits, shared=shared) for shared in self.shared]
        self._next = 0

    def restart(self) -> None:
        self.ledger = KeyLedger([FOUR, SLOW, SMALL, WIDE], clock=lambda: self.clock_s[0])

    async def _settle(self, account: Account) -> Settlement:
        self.accounts[account.coordinator] += 1
        await asyncio.sleep(0)
        if not self.is_up:
            raise ConnectionError("gone")
        return await self.ledger.settle(account)

    async def submit(self, index: int, key: ApiKey, *, tokens: int = 10, admitted: bool = False) -> int | None:
        """Begin a request at a coordinator. Return its number, or None if it was refused."""
        self._next += 1
        number = self._next
        admission, new = self.admissions[index % len(self.admissions)], request(number, tokens=tokens)
        try:
            async with admission.reserve([new], key, admitted=admitted):
                admission.submit(new, nothing, key=key)
        except OverloadedError:
            return None
        return number

    async def submit_many(self, count: int, key: ApiKey, *, tokens: int = 10) -> list[tuple[int, int]]:
        """Begin many at once, at all coordinators in turn. Return the coordinator and number of each that began."""
        numbers = await asyncio.gather(*(self.submit(index, key, tokens=tokens) for index in range(count)))
        return [(index % len(self.admissions), number) for index, number in enumerate(numbers) if number is not None]


def run(test: Callable[[Coordinators], Awaitable[None]], count: int = 2) -> None:
    async def main() -> None:
        coordinators = Coordinators(count)
        async with AsyncExitStack() as stack:
            for shared in coordinators.shared:
                task = asyncio.create_task(shared.run())
                stack.callback(task.cancel)
            for shared in coordinators.shared * 2:  # the first hears of the last
                await shared.settle()
            await test(coordinators)

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(("key", "allowed"), [(FOUR, 4), (SLOW, 10), (SMALL, 10), (WIDE, 4)])
def test_a_limit_holds_across_coordinators(key: ApiKey, allowed: int, count: int) -> None:
    async def test(coordinators: Coordinators) -> None:
        assert len(await coordinators.submit_many(50, key)) == allowed

    run(test, count)


def test_one_coordinator_may_use_all_of_a_limit() -> None:
    async def test(coordinators: Coordinators) -> None:
        numbers = [await coordinators.submit(0, FOUR) for _ in range(5)]
        assert [number is not None for number in numbers] == [True] * 4 + [False]

    run(test)


def test_an_end_makes_room_elsewhere() -> None:
    async def test(coordinators: Coordinators) -> None:
        begun = await coordinators.submit_many(8, FOUR)
        where, number = begun[0]
        coordinators.admissions[where].finish(number)
        await coordinators.shared[where].settle()
        assert len(await coordinators.submit_many(8, FOUR)) == 1

    run(test)


def test_unneeded_tokens_are_given_back_for_all() -> None:
    async def test(coordinators: Coordinators) -> None:
        number = await coordinators.submit(0, SMALL, tokens=100)
        assert number is not None
        assert await coordinators.submit(1, SMALL) is None
        coordinators.admissions[0].finish(number)
        await coordinators.shared[0].settle()
        assert await coordinators.submit(1, SMALL, tokens=99) is not None

    run(test)


def test_a_key_without_limits_never_waits_for_the_ledger() -> None:
    async def test(coordinators: Coordinators) -> None:
        before = coordinators.accounts.total()
        for key in (FREE, ANYBODY):
            begun = coordinators.submit(0, key)
            with pytest.raises(StopIteration):  # it ends without giving the loop a turn
                begun.send(None)
        assert coordinators.accounts.total() == before

    run(test)


def test_asks_are_sent_together() -> None:
    async def test(coordinators: Coordinators) -> None:
        before = coordinators.accounts.total()
        await coordinators.submit_many(200, SLOW)
        assert coordinators.accounts.total() - before <= 4

    run(test)


def test_what_was_accepted_already_is_counted_and_not_asked_for() -> None:
    async def test(coordinators: Coordinators) -> None:
        for _ in range(12):
            assert await coordinators.submit(0, SLOW, admitted=True) is not None
        await coordinators.shared[0].settle()
        assert await coordinators.submit(1, SLOW) is None

    run(test)


def test_without_the_ledger_each_takes_its_part_and_with_a_new_one_all_is_as_before() -> None:
    async def test(coordinators: Coordinators) -> None:
        coordinators.is_up = False
        begun = await coordinators.submit_many(20, FOUR)
        assert Counter(index for index, _ in begun) == {0: 2, 1: 2}
        coordinators.restart()
        coordinators.is_up = True
        for shared in coordinators.shared:
            await shared.settle()
        assert await coordinators.submit(0, FOUR) is None
        index, number = begun[0]
        coordinators.admissions[index].finish(number)
        await coordinators.shared[index].settle()
        assert await coordinators.submit(1, FOUR) is not None

    run(test)


def test_a_client_that_leaves_while_its_request_is_asked_for_gives_it_back() -> None:
    async def test(coordinators: Coordinators) -> None:
        for _ in range(10):
            waiting = asyncio.create_task(coordinators.submit(0, SLOW))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await coordinators.shared[0].settle()
        await coordinators.shared[0].settle()
        assert await coordinators.submit(1, SLOW) is not None

    run(test)


def test_parts_of_a_limit_are_at_least_one() -> None:
    key = ApiKey("k", max_requests=3, tokens_per_minute=1000)
    assert key.share(2) == ApiKey("k", max_requests=1, tokens_per_minute=500)
    assert key.share(8).max_requests == 1
    assert key.is_limited
    assert not FREE.is_limited
