"""What a key may begin in a minute, by a clock that the test turns."""

import asyncio
from collections.abc import Callable

import pytest

from decoding.errors import OverloadedError
from deployments.admission.admission import Admission
from deployments.admission.bounds import Limits
from deployments.admission.key_bounds import RateLimit
from deployments.configuration.api_keys import ApiKey
from tests.deployments.admission.test_admission import Backend, nothing, request


def test_a_budget_fills_evenly_up_to_a_minutes_worth() -> None:
    limit = RateLimit(60)
    assert limit.wait_s(60, now_s=1000.0) == 0
    limit.take(60, now_s=1000.0)
    assert limit.wait_s(1, now_s=1000.0) == pytest.approx(1)
    assert limit.wait_s(1, now_s=1001.0) == pytest.approx(0)
    assert limit.wait_s(60, now_s=2000.0) == 0
    limit.take(-1000, now_s=2000.0)
    assert limit.wait_s(60, now_s=2000.0) == 0
    limit.take(60, now_s=2000.0)
    assert limit.wait_s(60, now_s=2000.0) == pytest.approx(60)


def test_more_than_a_minutes_worth_goes_once_the_budget_is_full() -> None:
    limit = RateLimit(60)
    assert limit.wait_s(600, now_s=0.0) == 0
    limit.take(600, now_s=0.0)
    assert limit.wait_s(0, now_s=0.0) == pytest.approx(540)


def at_time(test: Callable[[Admission, list[float]], None]) -> None:
    """Run a test in a loop whose clock stands at the number in a list."""

    async def run() -> None:
        clock = [100.0]
        asyncio.get_running_loop().time = lambda: clock[0]  # type: ignore[method-assign]
        test(Admission(Backend(), Limits(running={"target": 8})), clock)

    asyncio.run(run())


def test_a_key_begins_so_many_requests_in_a_minute() -> None:
    def test(admission: Admission, clock: list[float]) -> None:
        key = ApiKey("slow", requests_per_minute=2)
        for number in range(2):
            admission.submit(request(number), nothing, key=key)
            admission.finish(number)  # that it has ended gives nothing back
        with pytest.raises(OverloadedError, match="as many requests as it may in a minute") as refused:
            admission.check_room(["target"], key)
        assert refused.value.bound == "key_requests_per_minute"
        assert refused.value.retry_after_s == 30
        admission.submit(request(2), nothing)  # another key's
        clock[0] += 30
        admission.check([request(3)], key)

    at_time(test)


def test_tokens_that_an_answer_did_not_need_are_given_back() -> None:
    def test(admission: Admission, clock: list[float]) -> None:
        key = ApiKey("small", tokens_per_minute=60)
        admission.submit(request(0, tokens=60), nothing, key=key)
        with pytest.raises(OverloadedError, match="tokens of a minute") as refused:
            admission.check([request(1, tokens=30)], key)
        assert refused.value.bound == "key_tokens_per_minute"
        assert refused.value.retry_after_s == 30
        admission.record_progress(0, 9)  # and one token of prompt: 50 are left
        admission.finish(0)
        admission.check([request(1, tokens=50)], key)
        admission.submit(request(1, tokens=50), nothing, key=key)
        with pytest.raises(OverloadedError):
            admission.check([request(2, tokens=2)], key)

    at_time(test)


def test_a_group_above_a_minutes_worth_begins_together() -> None:
    def test(admission: Admission, clock: list[float]) -> None:
        key = ApiKey("slow", requests_per_minute=2)
        group = [request(number) for number in range(4)]
        admission.check(group, key)
        for each in group:
            admission.submit(each, nothing, key=key)
        with pytest.raises(OverloadedError) as refused:
            admission.check_room(["target"], key)
        assert refused.value.retry_after_s == 60  # two for what was too much, one to begin: 90 s, at most 60 are told

    at_time(test)


def test_what_is_not_charged_takes_nothing() -> None:
    def test(admission: Admission, clock: list[float]) -> None:
        key = ApiKey("slow", requests_per_minute=1, tokens_per_minute=20)
        admission.submit(request(0, tokens=20), nothing, key=key, charged=False)
        admission.finish(0)
        admission.check([request(1, tokens=20)], key)

    at_time(test)
