"""Requests get slots in one order on all replicas: none waits for another one that waits for it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from transformers import PreTrainedModel

from actors.coordinator.request import Delta, Endpoint, Request
from decoding.beams.options import BeamOptions
from decoding.blending.params import EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model
from tests.support.turns import Turns, has_ended

TARGETS = ["first", "second", "third"]
MODELS: dict[str, PreTrainedModel] = {
    "first": tiny_model("llama-gqa"),
    "second": tiny_model("qwen3"),
    "third": tiny_model("llama-gqa"),
    "drafter": tiny_model("llama-gqa"),
}
PROMPTS = [[(5 * i + 3 * j + i * j) % VOCAB for j in range(10)] for i in range(24)]


def endpoint(leader: str, *members: str) -> Endpoint:
    return Endpoint(leader, leader, None, 0, decode=str, members=members, ensemble=EnsembleOptions())


def requests(endpoints: Sequence[Endpoint], count: int, *, max_tokens: int = 16) -> list[Request]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return [
        Request(endpoints[i % len(endpoints)], PROMPTS[i], params, request_id=i, arrived_at_s=i) for i in range(count)
    ]


def turns(slots: int | dict[str, int], *, seed: int | None = None, pages: int | None = None) -> Turns:
    """slots: of all targets, or by model."""
    by_model = slots if isinstance(slots, dict) else dict.fromkeys(TARGETS, slots)
    return Turns(
        {
            name: Runner(MODELS[name], slots=count, max_length=64, max_query=64, pages=pages)
            for name, count in by_model.items()
        },
        seed=seed,
    )


def tokens(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("slots", [1, 3])
def test_leaders_of_each_others_members_take_no_longer_than_one_ensemble(slots: int) -> None:
    there, back = endpoint("first", "second"), endpoint("second", "first")
    needed = []
    for endpoints in ([there], [there, back]):
        stage = turns(slots)
        answers = [stage.begin(request) for request in requests(endpoints, 12, max_tokens=8)]
        needed.append(stage.finish(answers, at_most=3000))
    alone, crossed = needed
    assert crossed <= 1.25 * alone


def mixed(stage: Turns) -> list[list[int]]:
    """Answer ensembles in a circle, plain requests and beam searches at once. Returns the texts."""
    kinds = [
        endpoint("first", "second"),
        endpoint("second", "third"),
        endpoint("third", "first"),
        endpoint("third", "second", "first"),
        endpoint("first"),
    ]
    begun = [stage.begin(request) for request in requests(kinds, 15, max_tokens=30)]
    search = replace(requests([endpoint("second")], 20, max_tokens=8)[-1], beams=BeamOptions(num_beams=3))
    begun += [stage.begin(replace(search, request_id=request_id)) for request_id in (20, 21)]
    stage.finish(begun, at_most=5000)
    assert [deltas[-1].error for deltas in begun] == [None] * len(begun)
    stage.take(4)
    loads = [loop.load() for loop in stage.engine.loops.values()]
    assert [(load.active, load.waiting) for load in loads] == [(0, 0)] * 3
    return [tokens(deltas) for deltas in begun]


def test_nobody_waits_for_ever_whatever_comes_first() -> None:
    """With loops that take turns at random, and so few pages that rows are preempted all the time."""
    expected = mixed(turns(20))
    for seed in range(2):
        stage = turns(3, seed=seed, pages=6)
        assert mixed(stage) == expected
        assert any(loop.times.preemptions for loop in stage.engine.loops.values())


def test_requests_to_a_member_do_not_wait_for_ensembles_whose_leader_is_full() -> None:
    stage = turns({"first": 1, "second": 4})
    ensembles = [stage.begin(request) for request in requests([endpoint("first", "second")], 8)]
    stage.take(6)
    plain = Request(endpoint("second"), PROMPTS[9], SamplingParams(max_tokens=4, temperature=0), arrived_at_s=9)
    stage.finish([stage.begin(plain)], at_most=10)
    assert sum(bool(deltas) and has_ended(deltas[-1]) for deltas in ensembles) < 2
    assert stage.engine.loops["second"].load().active == 1


def test_requests_to_a_leader_do_not_wait_for_ensembles_whose_member_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those have their slots back at once when the member has one for them, so they are no later."""
    monkeypatch.setattr("actors.loops.mailbox.REPORT_PERIOD_S", 0.0)
    stage = turns({"first": 2, "second": 1})
    first, second, *_ = (
        [stage.begin(request)] for request in requests([endpoint("first", "second")], 12, max_tokens=30)
    )
    stage.take(6)
    params = SamplingParams(max_tokens=40, temperature=0)
    plain = [stage.begin(Request(endpoint("first"), PROMPTS[9], params, arrived_at_s=9 + i)) for i in range(8)]
    stage.take(6)
    assert any(plain)
    assert not has_ended(first[0][-1])
    stage.finish(first, at_most=200)
    ended = sum(bool(deltas) and has_ended(deltas[-1]) for deltas in plain)
    stage.finish(second, at_most=100)
    assert sum(has_ended(deltas[-1]) for deltas in plain if deltas) <= ended + 3
    stage.finish(plain, at_most=1000)
    assert len({tuple(tokens(deltas)) for deltas in plain}) == 1


def test_a_leader_that_died_holds_no_slots_of_members() -> None:
    stage = turns({"first": 2, "second": 2})
    for request in requests([endpoint("first", "second")], 2):
        stage.begin(request)
    stage.take(8)
    assert stage.engine.loops["second"].load().active == 2
    stage.running.remove("first")
    stage.engine.lose("first")
    stage.take(3)
    for request in requests([endpoint("first", "second")], 2):
        stage.engine.coordinator.cancel(request.request_id)
    stage.take(3)
    assert stage.engine.loops["second"].load().active == 0


@pytest.mark.parametrize("dead", [["coordinator"], ["coordinator", "first"], ["coordinator", "drafter"]], ids=str)
def test_the_slots_of_a_dead_coordinator_are_free_after_three_seconds(dead: list[str]) -> None:
    """On targets, members and drafters, whoever died with it. Until then another coordinator may take rows over."""
    stage = turns({"first": 2, "second": 3, "drafter": 2})
    clock = mock.Mock(return_value=1000.0)
    loops: dict[str, Any] = dict(stage.engine.loops)
    for loop in loops.values():
        loop._mailbox._clock = clock
    drafted = replace(endpoint("first", "second"), drafter="drafter", draft_length=1)
    for request in requests([drafted, endpoint("second")], 8, max_tokens=50):
        stage.begin(request)
    stage.take(8)
    held = {name: loop.load() for name, loop in loops.items() if name not in dead}
    assert all(load.active for load in held.values())
    assert any(load.waiting for load in held.values())
    for name in dead:
        stage.kill(name)
    for second in range(3):
        loads = [loops[name].load() for name in held]
        assert all(load.active for load in loads), f"after {second} s"
        clock.return_value += 1.0
        stage.take(2)
    loads = [loops[name].load() for name in held]
    assert [(load.active, load.waiting) for load in loads] == [(0, 0)] * len(held)
