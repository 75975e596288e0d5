"""Beam searches through the whole engine, beside other requests: the same answers as alone, and no slot is lost."""

from typing import Any

import pytest

from actors.coordinator.request import Delta, Endpoint, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange, LocalLink
from actors.wire.messages import Admit, Beams, Cancel
from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.beam_loop import Asked, search_all
from tests.support.faulty_link import FaultyLink
from tests.support.models import VOCAB, tiny_model
from tests.support.waiting import wait_until_idle

END = 3
ENDPOINT = Endpoint("e", "target", "drafter", 3, lambda tokens: "".join(chr(97 + token) for token in tokens))
KINDS = [
    BeamOptions(num_beams=4, num_return_sequences=4),
    BeamOptions(num_beams=4, num_beam_groups=2, diversity_penalty=1.0, length_penalty=0.0),
    BeamOptions(num_beams=6, num_return_sequences=2, force_words_ids=(((7, 8, 9),), ((1,), (5, 6)))),
    BeamOptions(num_beams=1, early_stopping="never"),
]


def make_runner(family: str = "llama-gqa", *, slots: int = 7) -> Runner:
    return Runner(tiny_model(family), slots=slots, max_length=96, max_query=32)


def prompt(i: int) -> list[int]:
    return [(11 * i + j * j) % VOCAB for j in range(1 + 7 * i % 40)]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "temperature": 0, "eos_token_ids": (END,), **more})


def searches(count: int) -> list[Asked]:
    drawn = params(temperature=0.9, seed=4)
    return [(prompt(i), drawn if i % 5 == 4 else params(), KINDS[i % len(KINDS)]) for i in range(count)]


def requests_of(asked: list[Asked]) -> list[Request]:
    return [Request(ENDPOINT, tokens, params, beams=options) for tokens, params, options in asked]


def assert_found(answer: list[Delta], expected: list[Hypothesis]) -> None:
    (best,) = answer
    actual = [best, *best.others]
    assert [answer.token_ids for answer in actual] == [answer.tokens for answer in expected]
    assert [answer.score for answer in actual] == pytest.approx([answer.score for answer in expected], abs=1e-4)
    assert [answer.finish for answer in actual] == [answer.finish for answer in expected]
    assert [answer.text for answer in actual] == [
        ENDPOINT.decode([token for token in answer.tokens if token != END]) for answer in expected
    ]
    assert [answer.statistics.committed for answer in actual] == [len(answer.tokens) for answer in expected]


def test_searches_beside_requests_with_drafts() -> None:
    asked = searches(20)
    expected = search_all(make_runner(), asked)
    others = [Request(ENDPOINT, prompt(i), params(temperature=i % 2, seed=i)) for i in range(20)]
    target = make_runner()
    with Engine({"target": ("target", target), "drafter": ("drafter", make_runner())}) as engine:
        alone = engine.generate(others)
        mixed = engine.generate([request for pair in zip(requests_of(asked), others, strict=True) for request in pair])
        wait_until_idle(engine)
    for answer, beams in zip(mixed[::2], expected, strict=True):
        assert_found(answer, beams)
    for answer, before in zip(mixed[1::2], alone, strict=True):
        assert [t for delta in answer for t in delta.token_ids] == [t for delta in before for t in delta.token_ids]
    assert target.cache.free == 7


def test_searches_under_faults() -> None:
    asked = searches(8)
    expected = search_all(make_runner(), asked)

    def wrap(link: LocalLink) -> FaultyLink:
        return FaultyLink(link, seed=1, commits=True)

    with Engine({"target": ("target", make_runner())}, wrap_link=wrap) as engine:
        answers = engine.generate(requests_of(asked))
    for answer, beams in zip(answers, expected, strict=True):
        assert_found(answer, beams)


def test_a_search_that_is_admitted_again_begins_anew() -> None:
    (asked,) = searches(1)
    (expected,) = search_all(make_runner(), [asked])
    exchange = LocalExchange()
    target = Target(make_runner(), exchange.join("t"), LoopOptions(prefill_chunk=16))
    coordinator: LocalLink = exchange.join("c")
    admit = Admit(1, list(asked[0]), len(asked[0]), asked[1], 0, drafter=False, beams=asked[2])
    for _ in range(2):  # the same request again, after half of the first
        coordinator.send("t", [admit])
        for _ in range(6):
            target.turn()
    messages: list[Any] = []
    for _ in range(40):
        coordinator.send("t", [Cancel(999)])
        target.turn()
        messages += [message for _, message in coordinator.receive(0) if isinstance(message, Beams)]
    assert [message.answers for message in messages] == [expected]
    assert target.load().active == 0


def test_cancelled_searches_free_their_slots() -> None:
    exchange = LocalExchange()
    runner = make_runner()
    target, coordinator = Target(runner, exchange.join("t"), LoopOptions(prefill_chunk=16)), exchange.join("c")
    long = params(max_tokens=60, eos_token_ids=())
    admits = [
        Admit(i, prompt(i), len(prompt(i)), long, 0, drafter=False, beams=BeamOptions(num_beams=3)) for i in range(4)
    ]
    coordinator.send("t", [*admits, Admit(9, [1, 2], 2, long, 0, drafter=False)])
    for _ in range(8):
        target.turn()
    assert (target.load().active, target.load().waiting) == (3, 2)  # the last request takes the slot that is left
    coordinator.send("t", [Cancel(0)])
    target.turn()
    assert (target.load().active, target.load().waiting) == (3, 1)
    coordinator.send("t", [Cancel(1), Cancel(3)])
    target.turn()
    assert (target.load().active, target.load().waiting) == (2, 0)
    coordinator.send("t", [Cancel(2), Cancel(9)])
    target.turn()
    assert runner.cache.free == 7


def test_more_beams_than_slots_are_refused() -> None:
    with Engine({"target": ("target", make_runner())}) as engine:
        request = Request(ENDPOINT, [1, 2], params(), beams=BeamOptions(num_beams=8))
        with pytest.raises(InvalidRequestError, match="7 slots") as caught:
            engine.generate([request])
        assert caught.value.field == "num_beams"


@pytest.mark.parametrize(
    ("field", "more", "options"),
    [
        ("force_words", {"suppress_tokens": (9,)}, BeamOptions(num_beams=3, force_words_ids=(((9,),),))),
        ("n", {"allowed_token_ids": (5,)}, BeamOptions(num_beams=3, num_return_sequences=2)),
    ],
)
def test_answers_that_cannot_be_are_not_found(field: str, more: dict, options: BeamOptions) -> None:
    with Engine({"target": ("target", make_runner())}) as engine:
        with pytest.raises(InvalidRequestError, match=r"the search found [01] answers") as caught:
            engine.generate([Request(ENDPOINT, [1, 2], params(**more), beams=options)])
        assert caught.value.field == field


def test_a_search_that_ends_without_live_beams_has_log_probabilities() -> None:
    """Its last step may make no answer longer: none ends, and none goes on."""
    ends = [(5 * i % VOCAB, 7 * i % VOCAB, 11 * i % VOCAB, 13 * i % VOCAB) for i in range(40)]
    requests = [
        Request(
            ENDPOINT,
            prompt(i),
            params(max_tokens=30, eos_token_ids=ids, logprobs=1),
            beams=BeamOptions(num_beams=1 + i % 2, early_stopping=(False, "never")[i % 3 == 0]),
        )
        for i, ids in enumerate(ends)
    ]
    with Engine({"target": ("target", make_runner())}) as engine:
        answers = engine.generate(requests)
    for (answer,) in answers:
        assert len(answer.logprobs) == len(answer.tokens)
