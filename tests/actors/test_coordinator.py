"""The coordinator, turn by turn, between fake replicas and with a clock that the test moves."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from actors.coordinator import Coordinator
from actors.link import LocalExchange
from actors.messages import Admit, Alive, Cancel, Commit, Drafting, Failed, Lost, Message, Offer, Report
from actors.request import Delta, Endpoint, Request
from decoding.ensemble_options import EnsembleOptions
from decoding.errors import ConsortError, OverloadedError, UnavailableError
from decoding.params import SamplingParams
from tests.support.replicas import FakeReplica

PROMPT = [10, 11, 12]


def decode(tokens: list[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


ENDPOINT = Endpoint("e", "big", "small", 4, decode)


class Stage:
    """A coordinator and its replicas: "t…" run the target's model, "d…" the drafter's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("actors.coordinator.time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.exchange = LocalExchange()
        self.link = self.exchange.join("coordinator")
        self.coordinator = Coordinator(self.link, **limits)  # type: ignore[arg-type]
        self.replicas: dict[str, FakeReplica] = {}
        self.deltas: list[list[Delta]] = []

    def set_replicas(self, *names: str) -> None:
        for name in names:
            if name not in self.replicas:
                self.replicas[name] = FakeReplica(self.exchange, name, "big" if name[0] == "t" else "small")
        self.coordinator.set_replicas(self.replicas[name].address for name in names)
        self.turn()

    def turn(self, *, later_s: float = 0.0) -> None:
        self.now_s += later_s
        self.link.wake()
        self.coordinator.turn()

    def submit(self, request_id: int = 1, *, max_tokens: int = 50, speculate: bool = True) -> list[Delta]:
        """Begin a request; returns the list that its deltas will be in."""
        deltas: list[Delta] = []
        params = SamplingParams(max_tokens=max_tokens)
        self.coordinator.submit(Request(ENDPOINT, PROMPT, params, speculate, request_id=request_id), deltas.append)
        self.turn()
        return deltas

    def say(self, name: str, *messages: Message) -> None:
        self.replicas[name].say(*messages)
        self.turn()

    def received(self, name: str) -> list[Message]:
        """What the replica was told since last asked, signs of life left out."""
        return [message for message in self.replicas[name].received() if not isinstance(message, Alive)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch, max_requests=3, max_silence_s=20, max_unplaced_s=100)


def commit(base: int, *tokens: int, request_id: int = 1, finish: str | None = None, admission: int = 0) -> Commit:
    accepted = len(tokens) - 1
    return Commit(request_id, base, list(tokens), 4, accepted, finish, 4, admission=admission)  # type: ignore[arg-type]


def admitted(messages: list[Message]) -> list[list[int]]:
    return [message.tokens for message in messages if isinstance(message, Admit)]


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_a_request_goes_to_the_least_loaded_replicas(stage: Stage) -> None:
    stage.set_replicas("t1", "t2", "d1", "d2")
    stage.say("t1", Report(active=9, waiting=0, slots=16, request_ids=[]))
    for request_id in (1, 2):
        stage.submit(request_id)
    placed = {name: len(admitted(stage.received(name))) for name in stage.replicas}
    assert placed == {"t1": 0, "t2": 2, "d1": 1, "d2": 1}


def test_target_and_drafter_are_told_the_same(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    expected = [Admit(1, PROMPT, 3, SamplingParams(max_tokens=50), 4, drafter=True, target="big")]
    assert stage.received("t1") == stage.received("d1") == expected


def test_a_request_that_does_not_speculate_has_no_drafter(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit(speculate=False)
    assert stage.received("t1") == [Admit(1, PROMPT, 3, SamplingParams(max_tokens=50), 0, drafter=False, target="big")]
    stage.turn(later_s=1)
    assert stage.received("d1") == []


def test_offers_and_verdicts_are_forwarded_and_text_streams(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("t1"), stage.received("d1")
    stage.say("d1", offer := Offer(1, 3, [20, 21]))
    assert stage.received("t1") == [offer]
    stage.say("t1", verdict := commit(3, 20, 0))
    assert stage.received("d1") == [verdict]
    assert [(delta.text, list(delta.tokens), delta.finish) for delta in deltas] == [("ua", [20, 0], None)]
    stage.say("t1", commit(5, 1, finish="length"))
    assert (deltas[-1].text, deltas[-1].finish) == ("b", "length")
    assert stage.received("d1") == stage.received("t1") == [Cancel(1)]


def test_strangers_change_nothing(stage: Stage) -> None:
    stage.set_replicas("t1", "d1", "t2", "d2")
    deltas = stage.submit()
    stage.turn()
    others = {"t1", "t2"} - {name for name in ("t1", "t2") if admitted(stage.received(name))}
    stage.say(other := others.pop(), commit(3, 7), Failed(1, "no"), commit(3, 7, request_id=99))
    stage.say("d2", Offer(99, 3, [1]))
    assert deltas == []
    assert stage.received(other) == [Cancel(1), Cancel(99)]


def test_duplicates_are_ignored(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    for _ in range(2):
        stage.say("t1", commit(3, 5, 6))
    assert tokens_of(deltas) == [5, 6]
    assert deltas[-1].statistics.steps == 1


def test_after_a_gap_the_request_starts_again_from_what_is_committed(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5))
    stage.received("t1"), stage.received("d1")
    stage.say("t1", commit(6, 9))
    for name in ("t1", "d1"):
        messages = stage.received(name)
        assert messages[0] == Cancel(1)
        assert admitted(messages) == [[*PROMPT, 5]]
    stage.say("t1", commit(7, 9))  # sent before it heard of that
    assert stage.received("t1") == []
    stage.say("t1", commit(4, 6, admission=1))
    assert tokens_of(deltas) == [5, 6]


def test_an_admission_does_not_change_when_the_text_grows(stage: Stage) -> None:
    """Links within one process hand the object itself on, and its receiver may read it late."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 5))
    assert admitted(stage.received("d1")) == [PROMPT]


@pytest.mark.parametrize("verdict", [[5, 6], [5, 9]], ids=["the same", "another"])
def test_a_verdict_from_a_target_that_the_request_has_left_and_come_back_to_counts_for_nothing(
    stage: Stage, verdict: list[int]
) -> None:
    """Under rejection sampling it is another text's, and would be continued by this one's only where they agree."""
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.set_replicas("t2")
    stage.say("t2", commit(3, 4, admission=1))
    stage.set_replicas("t1")
    assert [message.admission for message in stage.received("t1") if isinstance(message, Admit)] == [0, 2]
    stage.say("t1", commit(3, 4), commit(4, *verdict))
    assert stage.received("t1") == []  # least of all a Cancel, which would end what it works on now
    stage.say("t1", commit(4, 5, 9, admission=2))
    assert tokens_of(deltas) == [4, 5, 9]


def test_a_lost_target_is_replaced_and_the_stream_goes_on(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5, 6))
    stage.set_replicas("t2", "d1")
    assert stage.received("t2") == [
        Admit(1, [*PROMPT, 5, 6], 3, SamplingParams(max_tokens=50), 4, drafter=True, target="big", admission=1)
    ]
    stage.say("t1", commit(5, 9))
    stage.say("t2", commit(5, 7, admission=1))
    assert tokens_of(deltas) == [5, 6, 7]
    assert deltas[-1].text == "h"


def test_a_lost_target_is_waited_for(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5))
    stage.set_replicas("d1")
    stage.turn(later_s=50)
    stage.set_replicas("d1", "t2")
    assert admitted(stage.received("t2")) == [[*PROMPT, 5]]
    assert deltas[-1].error is None


def test_a_lost_drafter_is_missed_by_nobody_and_replaced(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("t1")
    stage.set_replicas("t1")
    assert stage.received("t1") == [Drafting(1, False)]
    stage.say("t1", commit(3, 5))
    assert tokens_of(deltas) == [5]
    stage.set_replicas("t1", "d2")
    assert admitted(stage.received("d2")) == [[*PROMPT, 5]]
    assert stage.received("t1") == [Drafting(1, True)]


def test_a_silent_replica_is_given_up_and_a_talking_one_is_not(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.received("t1")
    for _ in range(5):
        stage.turn(later_s=3)
        stage.say("t1", reports(1))
        stage.say("d1", reports(1))
    assert stage.received("t1") == []
    for _ in range(7):
        stage.turn(later_s=3)
        stage.say("d1", reports(1))
    stage.set_replicas("t1", "d1")
    assert admitted(stage.received("t1")) == [PROMPT]  # as far as the coordinator knows, it is another one


def test_a_hung_target_loses_its_requests_and_what_it_says_later_counts_for_nothing(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5))
    stage.set_replicas("t1", "t2", "d1")
    stage.turn(later_s=3)
    stage.say("t2", reports())
    stage.say("d1", reports(1))
    assert admitted(stage.received("t2")) == []
    stage.received("t1")
    stage.turn(later_s=2)
    assert admitted(stage.received("t2")) == [[*PROMPT, 5]]
    assert stage.received("t1") == [Cancel(1)]
    stage.submit(2)
    assert [message.request_id for message in stage.received("t2") if isinstance(message, Admit)] == [2]
    stage.say("t1", commit(4, 6))
    assert stage.received("t1") == [Cancel(1)]
    stage.say("t2", commit(4, 6, admission=1), commit(5, 7, admission=1))
    assert tokens_of(deltas) == [5, 6, 7]


def test_a_hung_target_that_wakes_gets_work_again(stage: Stage) -> None:
    stage.set_replicas("t1", "t2")
    stage.turn(later_s=5)
    stage.say("t2", reports())
    stage.turn(later_s=1)
    for request_id in (1, 2):
        stage.submit(request_id)
    assert len(admitted(stage.received("t2"))) == 2
    stage.say("t1", reports())
    stage.turn(later_s=1)
    stage.submit(3)
    assert admitted(stage.received("t1")) == [PROMPT]


def test_where_all_hang_requests_stay_and_new_ones_join_them(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit(1)
    stage.turn(later_s=6)
    stage.submit(2)
    stage.turn(later_s=6)
    assert [message.request_id for message in stage.received("t1") if isinstance(message, Admit)] == [1, 2]


def test_a_slow_target_that_answers_may_be_silent_for_longer(stage: Stage) -> None:
    """A long prefill is no hang: its process still says that it is well. A link that is cut looks the same."""
    stage.set_replicas("t1")
    stage.submit()
    for _ in range(9):
        stage.turn(later_s=1)
        stage.set_replicas("t1", "t2")
        stage.say("t2", reports())
    assert admitted(stage.received("t2")) == []
    for _ in range(2):
        stage.turn(later_s=1)
        stage.set_replicas("t1", "t2")
    assert admitted(stage.received("t2")) == [PROMPT]


def test_how_slow_targets_are_is_learnt(stage: Stage) -> None:
    stage.set_replicas("t1")
    stage.submit()
    for at in range(26):  # no longer than any replica may be silent
        stage.turn(later_s=1)
        stage.set_replicas("t1", "t2")
        stage.say("t2", reports())
        if at == 7:
            stage.say("t1", reports(1))
    assert admitted(stage.received("t2")) == []


def test_a_replica_that_is_withdrawn_hands_its_requests_over(stage: Stage) -> None:
    stage.set_replicas("t1", "d1", "d2")
    stage.submit()
    first, second = sorted(("d1", "d2"), key=lambda name: -len(admitted(stage.received(name))))
    stage.received("t1")
    stage.set_replicas("t1", second)
    assert stage.received(first) == [Cancel(1)]
    assert admitted(stage.received(second)) == [PROMPT]
    assert stage.received("t1") == []  # that goes on as if nothing had been
    stage.set_replicas("t2", second)
    assert stage.received("t1") == [Cancel(1)]
    assert admitted(stage.received("t2")) == [PROMPT]


def test_a_replica_that_is_withdrawn_finishes_what_nobody_else_can(stage: Stage) -> None:
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.set_replicas()
    assert stage.coordinator.models() == set()
    for base in range(3, 12):
        stage.say("t1", commit(base, base))
        stage.turn(later_s=2)
    stage.say("t1", commit(12, 12, finish="length"))
    assert deltas[-1].finish == "length"
    assert len(tokens_of(deltas)) == 10


def settle(stage: Stage, reported: dict[str, Report]) -> None:
    """Let every replica report, until the coordinator believes it."""
    for _ in range(3):
        for name, report in reported.items():
            stage.say(name, report)
        stage.turn(later_s=1)


def test_a_new_drafter_takes_half_of_the_drafting_over(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    ids = (1, 2)
    for request_id in ids:
        stage.submit(request_id)
    stage.set_replicas("t1", "d1", "d2")
    stage.received("t1")
    settle(stage, {"t1": reports(*ids), "d1": reports(*ids), "d2": reports()})
    (moved,) = [message.request_id for message in stage.received("d2") if isinstance(message, Admit)]
    assert Cancel(moved) in stage.received("d1")
    (left,) = set(ids) - {moved}
    assert stage.received("t1") == []  # the drafts that are there stay useful
    settle(stage, {"t1": reports(*ids), "d1": reports(left), "d2": reports(moved)})
    assert stage.received("d1") == stage.received("d2") == []


def test_a_new_target_takes_over_what_waits_for_a_slot(stage: Stage) -> None:
    stage.set_replicas("t1")
    ids = (1, 2, 3)
    for request_id in ids:
        stage.submit(request_id)
    stage.set_replicas("t1", "t2")
    busy = Report(active=2, waiting=1, slots=2, request_ids=list(ids))
    settle(stage, {"t1": busy, "t2": Report(active=0, waiting=0, slots=2, request_ids=[])})
    assert [message.request_id for message in stage.received("t2") if isinstance(message, Admit)] == [3]


def test_replicas_hear_that_the_coordinator_lives(stage: Stage) -> None:
    """Idle ones too, so that they report, and a hung one is known before it gets work."""
    stage.set_replicas("t1", "t2")
    for name in stage.replicas:
        stage.replicas[name].received()
    stage.turn(later_s=3)
    assert [stage.replicas[name].received() for name in ("t1", "t2")] == [[Alive()], [Alive()]]


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


def test_without_a_target_a_request_fails_in_the_end(stage: Stage) -> None:
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
    stage.say("t1", Drafting(1, True), commit(3, 20))
    assert tokens_of(deltas) == [20]


def test_a_drafter_that_lost_its_way_starts_again(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 20))
    stage.received("t1"), stage.received("d1")
    stage.say("d1", Failed(1, "a verdict was lost"))
    stage.turn(later_s=1)
    assert stage.received("t1") == [Drafting(1, False), Drafting(1, True)]
    assert admitted(stage.received("d1")) == [[*PROMPT, 20]]


def reports(*request_ids: int) -> Report:
    return Report(active=len(request_ids), waiting=0, slots=4, request_ids=list(request_ids))


def test_a_request_that_its_target_does_not_know_starts_again(stage: Stage) -> None:
    """Whatever was lost: the request's admission, or the verdict that ended it."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 20))
    stage.received("t1")
    stage.say("t1", reports())
    stage.turn(later_s=1)
    assert admitted(stage.received("t1")) == []  # the report may have crossed the admission
    stage.say("t1", reports())
    stage.turn(later_s=1)
    assert admitted(stage.received("t1")) == [[*PROMPT, 20]]


def test_a_request_that_its_replicas_know_is_left_alone(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.received("t1"), stage.received("d1")
    for _ in range(5):
        stage.say("t1", reports(1))
        stage.say("d1", reports(1))
        stage.turn(later_s=1)
    assert stage.received("t1") == stage.received("d1") == []


def test_strays_are_cancelled(stage: Stage) -> None:
    """A drafter that was given up and came back still has rows, which would hold their slots for ever."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("d1", reports(1, 77))
    assert Cancel(77) in stage.received("d1")
    stage.say("d1", Offer(78, 3, [5]))
    assert Cancel(78) in stage.received("d1")


def test_a_drafter_that_keeps_losing_a_request_is_not_asked_for_ever(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    asked = 0
    for _ in range(20):
        asked += len(admitted(stage.received("d1")))
        stage.say("d1", Failed(1, "no"))
        stage.turn(later_s=1)
    assert 1 < asked < 10


def test_a_request_that_ends_its_targets_fails(stage: Stage) -> None:
    deltas = stage.submit()
    for number in range(10):
        stage.set_replicas(f"t{number}")
        stage.turn(later_s=1)
    assert isinstance(deltas[-1].error, UnavailableError)
    assert "4 target replicas were lost" in str(deltas[-1].error)


def test_a_request_that_gets_on_may_lose_any_number_of_targets(stage: Stage) -> None:
    deltas = stage.submit(max_tokens=1000)
    for number in range(8):
        stage.set_replicas(f"t{number}")
        stage.say(f"t{number}", commit(3 + 20 * number, *range(20), admission=number))
    assert [delta.error for delta in deltas] == [None] * 8


def test_a_verdict_that_overlaps_the_text_starts_the_request_again(stage: Stage) -> None:
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5, 6))
    stage.received("t1")
    stage.say("t1", commit(4, 9, 9))
    assert tokens_of(deltas) == [5, 6]
    assert admitted(stage.received("t1")) == [[*PROMPT, 5, 6]]


def submit_ensemble(stage: Stage, **options: Any) -> list[Delta]:
    """A request whose members are the target's model and the drafter's, for want of another."""
    endpoint = Endpoint("e", "big", None, 0, decode, members=["small"], ensemble=EnsembleOptions(**options))
    deltas: list[Delta] = []
    stage.coordinator.submit(Request(endpoint, PROMPT, SamplingParams(max_tokens=50), request_id=1), deltas.append)
    stage.turn()
    return deltas


def members_of(messages: list[Message]) -> list[list[str | None]]:
    ensembles = [message.ensemble for message in messages if isinstance(message, Admit) and message.ensemble]
    return [[None if member.address is None else member.address.name for member in one.members] for one in ensembles]


def test_an_ensemble_that_loses_a_member_starts_again_with_another_replica(stage: Stage) -> None:
    stage.set_replicas("t1", "d1", "d2")
    deltas = submit_ensemble(stage)
    stage.say("t1", commit(3, 5))
    ((first,),) = members_of(stage.received("t1"))
    second = "d2" if first == "d1" else "d1"
    stage.set_replicas("t1", second)
    messages = stage.received("t1")
    assert messages[0] == Cancel(1)
    assert members_of(messages) == [[second]]
    assert admitted(messages) == [[*PROMPT, 5]]
    stage.set_replicas("t1")  # now there is none: it is waited for
    for _ in range(5):
        stage.turn(later_s=1)
        stage.say("t1", reports())
    stage.set_replicas("t1", "d3")
    assert members_of(stage.received("t1")) == [["d3"]]
    assert deltas[-1].error is None


def test_an_ensemble_goes_on_without_a_member_where_that_is_allowed(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    submit_ensemble(stage, on_member_failure="drop")
    stage.received("t1")
    stage.set_replicas("t1")
    for _ in range(5):
        stage.turn(later_s=1)
        stage.say("t1", reports(1))
    assert stage.received("t1") == [Lost(1, "d1")]


def test_an_ensemble_whose_member_took_too_long_is_tried_again(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = submit_ensemble(stage)
    for _ in range(3):
        stage.say("t1", Failed(1, "member 'small' took too long"))
        assert deltas == []
    stage.say("t1", Failed(1, "member 'small' took too long"))
    assert "took too long" in str(deltas[-1].error)


def test_tokens_that_cannot_be_read_fail_only_their_request(stage: Stage) -> None:
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
