"""How a coordinator handles requests: assigns, streams, refuses and ends them."""

from dataclasses import replace

import pytest
from msgspec import structs

from actors.coordinator.request import Delta, Request
from actors.wire.messages import Admit, AttachDrafter, Cancel, Failed, PromptAttention, Report
from decoding.errors import ConsortError, OverloadedError, UnavailableError
from decoding.sampling.params import SamplingParams
from tests.support.coordinator_stage import ENDPOINT, PROMPT, Stage, admitted, commit, decode, tokens_of


def test_a_request_goes_to_the_least_loaded_replicas(stage: Stage) -> None:
    stage.set_replicas("t1", "t2", "d1", "d2")
    stage.say("t1", Report(active=9, waiting=0, slots=16, request_ids=[]))
    for request_id in (1, 2):
        stage.submit(request_id)
    counts = {name: len(admitted(stage.received(name))) for name in stage.replicas}
    assert counts == {"t1": 0, "t2": 2, "d1": 1, "d2": 1}


def test_target_and_drafter_get_the_same_admission(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    address = stage.replicas["t1"].address
    expected = Admit(
        1, PROMPT, 3, SamplingParams(max_tokens=50), 4, drafter=True, target=address, attached_drafter="d1"
    )
    assert stage.received("t1") == [expected]
    assert stage.received("d1") == [structs.replace(expected, drafts_only=True)]


def test_a_request_that_does_not_speculate_has_no_drafter(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit(speculate=False)
    assert stage.received("t1") == [
        Admit(1, PROMPT, 3, SamplingParams(max_tokens=50), 0, drafter=False, target=stage.replicas["t1"].address)
    ]
    stage.turn(later_s=1)
    assert stage.received("d1") == []


def test_text_streams(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("t1"), stage.received("d1")
    stage.say("t1", commit(3, 20, 0))
    assert stage.received("d1") == []  # the target sends it Advance
    assert [(delta.text, delta.token_ids, delta.finish) for delta in deltas] == [("ua", [20, 0], None)]
    stage.say("t1", commit(5, 1, finish="length"))
    assert (deltas[-1].text, deltas[-1].finish) == ("b", "length")
    assert stage.received("d1") == stage.received("t1") == [Cancel(1)]


def test_attention_to_the_prompt_comes_with_the_end_and_from_the_right_admission(stage: Stage) -> None:
    stage.set_replicas("t1")
    request = Request(ENDPOINT, PROMPT, SamplingParams(max_tokens=50, prompt_attention=True), False, request_id=1)
    stage.coordinator.submit(request, lambda delta: None)
    stage.turn()
    stage.say("t1", PromptAttention(1, [0.2, 0.3, 0.5], admission=7), PromptAttention(99, [1.0]))
    assert request.prompt_attention == []
    stage.say("t1", PromptAttention(1, [0.5, 0.25, 0.25]), commit(3, 1, finish="stop"))
    assert request.prompt_attention == [0.5, 0.25, 0.25]


def test_messages_from_other_replicas_change_nothing(stage: Stage) -> None:
    stage.set_replicas("t1", "d1", "t2", "d2")
    deltas = stage.submit()
    stage.turn()
    others = {"t1", "t2"} - {name for name in ("t1", "t2") if admitted(stage.received(name))}
    stage.say(other := others.pop(), commit(3, 7), Failed(1, "no"), commit(3, 7, request_id=99))
    assert deltas == []
    assert stage.received(other) == [Cancel(1), Cancel(99)]


def test_too_many_requests_are_refused_until_one_ends(stage: Stage) -> None:
    stage.set_replicas("t1")
    for request_id in (1, 2, 3):
        stage.submit(request_id)
    with pytest.raises(OverloadedError) as caught:
        stage.submit(4)
    assert caught.value.retry_after_s > 0
    stage.say("t1", commit(3, 1, request_id=2, finish="stop"))
    stage.submit(4)


def test_cancelling_frees_both_replicas_and_ends_the_stream(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("t1"), stage.received("d1")
    for _ in range(2):
        stage.coordinator.cancel(1)
        stage.turn()
    assert stage.received("t1") == stage.received("d1") == [Cancel(1)]
    stage.say("t1", commit(3, 5))
    assert deltas == []


def test_a_request_fails_if_no_target_appears_in_time(stage: Stage) -> None:
    deltas = stage.submit()
    stage.turn(later_s=99)
    assert deltas == []
    stage.turn(later_s=2)
    (delta,) = deltas
    assert isinstance(delta.error, UnavailableError)
    assert "big" in str(delta.error)


def test_a_request_that_its_target_cannot_serve_fails(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("d1")
    stage.say("t1", Failed(1, "too long"))
    assert isinstance(deltas[-1].error, ConsortError)
    assert "too long" in str(deltas[-1].error)
    assert stage.received("d1") == [Cancel(1)]


def test_a_client_that_raises_ends_only_its_own_request(stage: Stage) -> None:
    def broken(delta: Delta) -> None:
        raise RuntimeError("the client is gone")

    stage.set_replicas("t1", "d1")
    stage.coordinator.submit(Request(ENDPOINT, PROMPT, SamplingParams(max_tokens=50), request_id=2), broken)
    deltas = stage.submit(1)
    stage.received("t1")
    stage.say("t1", commit(3, 20, request_id=2), commit(3, 20, request_id=1))
    assert tokens_of(deltas) == [20]
    assert Cancel(2) in stage.received("t1")


def test_a_message_that_is_not_for_coordinators_is_dropped(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", AttachDrafter(1, None), commit(3, 20))
    assert tokens_of(deltas) == [20]


@pytest.mark.parametrize("with_a_commit", [True, False])
def test_text_that_cannot_be_decoded_at_the_end_fails_only_its_request(stage: Stage, with_a_commit: bool) -> None:
    """Text that was held back is decoded when max_time_s is over."""
    good_calls = [100]

    def decode_a_few_times(tokens: list[int]) -> str:
        good_calls[0] -= 1
        if good_calls[0] < 0:
            raise ValueError("no such token")
        return "\ufffd"  # an incomplete character, so it is held back

    stage.set_replicas("t1")
    endpoint = replace(ENDPOINT, drafter=None, decode=decode_a_few_times)
    deltas: list[Delta] = []
    params = SamplingParams(max_tokens=50, max_time_s=1)
    stage.coordinator.submit(Request(endpoint, PROMPT, params, request_id=2), deltas.append)
    others = stage.submit(1)
    stage.say("t1", commit(3, 20, request_id=2))
    good_calls[0] = 1 if with_a_commit else 0
    if with_a_commit:
        stage.now_s += 2
        stage.say("t1", commit(4, 21, request_id=2))
    else:
        stage.turn(later_s=2)
    assert isinstance(deltas[-1].error, UnavailableError)
    stage.say("t1", commit(3, 20))
    assert tokens_of(others) == [20]


def test_a_prompt_that_cannot_be_decoded_fails_only_its_request(stage: Stage) -> None:
    def broken(tokens: list[int]) -> str:
        raise IndexError("piece id is out of range")

    stage.set_replicas("t1", "d1")
    deltas: list[Delta] = []
    request = Request(replace(ENDPOINT, decode=broken), PROMPT, SamplingParams(max_tokens=50), request_id=2)
    stage.coordinator.submit(request, deltas.append)
    others = stage.submit(1)
    assert isinstance(deltas[-1].error, UnavailableError)
    assert "piece id is out of range" in str(deltas[-1].error)
    assert Cancel(2) in stage.received("t1")
    stage.say("t1", commit(3, 20))
    assert tokens_of(others) == [20]


def test_tokens_that_cannot_be_decoded_fail_only_their_request(stage: Stage) -> None:
    def decode_few(tokens: list[int]) -> str:
        if 66 in tokens:
            raise ValueError("no such token")
        return decode(tokens)

    stage.set_replicas("t1", "d1")
    endpoint = replace(ENDPOINT, decode=decode_few)
    deltas: list[Delta] = []
    params = SamplingParams(max_tokens=50)
    stage.coordinator.submit(Request(endpoint, PROMPT, params, request_id=2), deltas.append)
    others = stage.submit(1)
    stage.say("t1", commit(3, 66, request_id=2), commit(3, 20, request_id=1))
    assert "no such token" in str(deltas[-1].error)
    assert tokens_of(others) == [20]


def test_an_id_that_is_in_use_is_refused(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    first, second = stage.submit(1), stage.submit(1)
    assert second[-1].error is not None
    stage.say("t1", commit(3, 20))
    assert tokens_of(first) == [20]


def test_the_tokens_of_each_step_are_told() -> None:
    """Two requests in one step, then each in one of its own although both come in one turn."""
    steps: list[tuple[str, int]] = []
    stage = Stage(on_step=lambda endpoint, tokens: steps.append((endpoint, tokens)))
    stage.set_replicas("t1", "d1")
    for request_id in (1, 2):
        stage.submit(request_id)
    end = len(PROMPT)
    stage.say("t1", commit(end, 1, 2, request_id=1), commit(end, 3, request_id=2))
    stage.say("t1", commit(end + 2, 4, request_id=1), commit(end + 3, 5, 6, 7, request_id=1))
    stage.say("t1", commit(end + 1, 8, request_id=2), commit(end + 1, 8, request_id=2))  # a duplicate counts once
    assert steps == [("e", 2 * end + 3), ("e", 1), ("e", 3), ("e", 1)]
