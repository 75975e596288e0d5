"""A leader between its coordinator and a member without a model: no member keeps a request that has ended."""

from typing import Any

import pytest
import torch

from actors.loops.options import LoopOptions
from actors.verifier.loop import Target
from actors.wire.link import LocalExchange
from actors.wire.logits_codec import pack
from actors.wire.messages import (
    Admit,
    Cancel,
    Commit,
    Ensemble,
    Failed,
    Join,
    Joined,
    LogitsReply,
    LogitsRequest,
    LogitsTransport,
    Member,
    MemberLost,
    Message,
    ReplicaAddress,
)
from actors.wire.messages import Report as Reported
from decoding.blending.params import BlendParams, EnsembleOptions
from decoding.sampling.params import SamplingParams
from engine.model.runner import Runner
from tests.support.models import VOCAB, tiny_model

PROMPT = [5, 6, 7, 8]


class Stage:
    """A tiny target that leads ensembles. The test plays the coordinator and the member."""

    def __init__(self) -> None:
        exchange = LocalExchange()
        self.coordinator, self.member = exchange.join("coordinator"), exchange.join("m")
        runner = Runner(tiny_model("llama-gqa"), slots=2, max_length=64, max_query=64)
        self.leader = Target(runner, exchange.join("t"), LoopOptions(prefill_chunk=16, adaptive=False))
        self.committed: list[int] = []
        self.failed: list[Failed] = []

    def admit(self, admission: int = 0, *, max_tokens: int = 8, **options: Any) -> list[Message]:
        """Admit request 1 with one member. Returns what the member receives."""
        ensemble = Ensemble("leader", [Member("m", ReplicaAddress("m", "m"))], EnsembleOptions(**options))
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        return self.send(Admit(1, PROMPT, 4, params, 0, drafter=False, ensemble=ensemble, admission=admission))

    def send(self, *messages: Message) -> list[Message]:
        """Send messages of the coordinator. Returns what the member receives."""
        self.coordinator.send("t", messages)
        return self.turn()

    def send_as_member(self, *messages: Message) -> list[Message]:
        self.member.send("t", messages)
        return self.turn()

    def turn(self) -> list[Message]:
        for _ in range(12):
            self.coordinator.send("t", [Cancel(999)])  # something to receive, so that no turn waits
            self.leader.turn()
        for _, message in self.coordinator.receive(0):
            if isinstance(message, Commit):
                self.committed += [token.id for token in message.tokens]
            elif isinstance(message, Failed):
                self.failed.append(message)
        return [message for _, message in self.member.receive(0) if not isinstance(message, Reported)]

    def reply(self, step: int, admission: int, token: int) -> LogitsReply:
        """Return the reply of a member that is sure of a token."""
        logits = torch.full((1, VOCAB), -1e4)
        logits[0, token] = 1e4
        return LogitsReply(1, step, pack(logits, LogitsTransport(), None), [[]], admission)


def test_a_member_that_took_too_long_is_sent_a_cancel() -> None:
    stage = Stage()
    stage.admit(on_member_failure="drop", member_timeout_s=1e-6)
    received = stage.send_as_member(Joined(1))
    assert [type(message) for message in received] == [
        LogitsRequest,
        Cancel,
        Cancel,
    ]  # when it is dropped, and at the end
    assert len(stage.committed) == 8


@pytest.mark.parametrize("cause", [MemberLost(1, "m"), Failed(1, "no room")], ids=["withdrawn", "failed"])
def test_a_member_that_is_given_up_is_sent_a_cancel(cause: Message) -> None:
    stage = Stage()
    stage.admit(on_member_failure="drop")
    received = stage.send_as_member(cause) if isinstance(cause, Failed) else stage.send(cause)
    assert received == [Cancel(1), Cancel(1)]
    assert len(stage.committed) == 8


def test_a_member_that_was_dropped_is_not_asked_again() -> None:
    stage = Stage()
    stage.admit(on_member_failure="drop", max_tokens=40)
    stage.coordinator.send("t", [MemberLost(1, "m")])
    stage.leader.turn()
    stage.member.receive(0)
    for _ in range(2):
        assert stage.send_as_member(*[Reported(0, 0, 4, [])] * 4) == []


def test_what_a_member_should_not_have_is_cancelled() -> None:
    """Else a Cancel that was lost, because the link broke or the member was away, would hold a slot for ever."""
    stage = Stage()
    stage.admit()
    assert stage.send_as_member(Reported(2, 0, 4, [1, 77])) == [Cancel(77)]
    stage.send(Cancel(1))
    assert stage.send_as_member(Reported(1, 0, 4, [1])) == [Cancel(1)]


def test_a_request_that_comes_back_without_a_cancel_begins_anew() -> None:
    stage = Stage()
    stage.admit()
    received = stage.admit(admission=1)
    assert [type(message) for message in received] == [Cancel, Join]
    received = stage.send_as_member(Joined(1, admission=1))
    assert [type(message) for message in received] == [LogitsRequest]
    assert stage.send(Cancel(1)) == [Cancel(1)]


def test_a_request_that_comes_back_and_is_refused_leaves_nothing_behind() -> None:
    stage = Stage()
    stage.admit()
    too_long = SamplingParams(max_tokens=1000)
    assert stage.send(Admit(1, PROMPT, 4, too_long, 0, drafter=False, admission=1)) == [Cancel(1)]
    assert [failed.admission for failed in stage.failed] == [1]
    assert stage.leader.load().active == 0


def test_what_a_member_says_of_an_earlier_admission_counts_for_nothing() -> None:
    stage = Stage()
    stage.admit()
    stage.send_as_member(Joined(1))
    stage.admit(admission=1)
    assert stage.send_as_member(Joined(1)) == []
    stage.send_as_member(Failed(1, "no room"))
    assert stage.failed == []
    (request,) = stage.send_as_member(Joined(1, admission=1))
    assert isinstance(request, LogitsRequest)
    assert stage.send_as_member(stage.reply(request.step, 0, token=11)) == []
    assert stage.committed == []
    stage.send_as_member(stage.reply(request.step, 1, token=12))
    assert stage.committed == [12]


@pytest.mark.parametrize("weights", [(0, 1), (1, 1, 1)])
def test_an_ensemble_that_its_members_do_not_suffice_for_is_given_back(weights: tuple[float, ...]) -> None:
    stage = Stage()
    options = EnsembleOptions(blend=BlendParams(weights=weights), on_member_failure="drop")
    ensemble = Ensemble("leader", [Member("m", None)], options)
    params = SamplingParams(max_tokens=8, temperature=0)
    stage.send(Admit(1, PROMPT, 4, params, 0, drafter=False, ensemble=ensemble))
    assert [failed.request_id for failed in stage.failed] == [1]
    stage.send(Admit(2, PROMPT, 4, params, 0, drafter=False))
    assert len(stage.committed) == 8


def test_a_reply_for_which_memory_ran_out_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(*given: object) -> torch.Tensor:
        monkeypatch.undo()
        raise torch.OutOfMemoryError

    stage = Stage()
    stage.admit(max_tokens=1)
    (request,) = stage.send_as_member(Joined(1))
    monkeypatch.setattr("actors.verifier.leader.unpack", unpack)
    assert stage.send_as_member(stage.reply(1, 0, 9)) == []
    assert stage.send_as_member(*[Reported(1, 0, 4, [1])] * 3) == [request]
    stage.send_as_member(stage.reply(1, 0, 9))
    assert stage.committed == [9]


def test_a_request_that_loses_its_slot_here_gives_up_those_elsewhere_until_it_has_one_again() -> None:
    stage = Stage()
    stage.admit()
    stage.send(Admit(0, PROMPT, 4, SamplingParams(max_tokens=50, temperature=0), 0, drafter=False))
    (request,) = stage.send_as_member(Joined(1))
    assert stage.leader._rows.preempt_last()
    received = stage.send_as_member(stage.reply(1, 0, token=11))
    assert [type(message) for message in received] == [Cancel, Join]  # after a forward of the other request
    assert 11 not in stage.committed
    (again,) = stage.send_as_member(Joined(1))
    assert isinstance(request, LogitsRequest)
    assert isinstance(again, LogitsRequest)
    assert again.step > request.step


def test_what_a_member_says_of_an_invitation_that_was_withdrawn_counts_for_nothing() -> None:
    stage = Stage()
    (join,) = stage.admit()
    stage.send(Admit(0, PROMPT, 4, SamplingParams(max_tokens=50, temperature=0), 0, drafter=False))
    assert stage.leader._rows.preempt_last()
    cancel, again = stage.send()  # before the member's answer to the first invitation has arrived
    assert isinstance(join, Join)
    assert isinstance(again, Join)
    assert cancel == Cancel(1)
    early: list[Message] = [Joined(1, invitation=join.invitation), Failed(1, "no room", invitation=join.invitation)]
    assert stage.send_as_member(*early) == []
    assert stage.failed == []
    (request,) = stage.send_as_member(Joined(1, invitation=again.invitation))
    assert isinstance(request, LogitsRequest)
    assert request.invitation == again.invitation


def test_members_are_invited_once_the_leader_has_a_slot() -> None:
    stage = Stage()
    plain = SamplingParams(max_tokens=40, temperature=0)
    stage.leader._inbox._handle("coordinator", Admit(8, PROMPT, 4, plain, 0, drafter=False))
    stage.leader._inbox._handle("coordinator", Admit(9, PROMPT, 4, plain, 0, drafter=False))
    assert stage.admit() == []
    (join,) = stage.send(Cancel(8))
    assert isinstance(join, Join)
