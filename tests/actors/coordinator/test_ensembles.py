"""How a coordinator handles members of ensembles that come and go."""

from typing import Any

from actors.coordinator.request import Delta, Endpoint, Request
from actors.wire.messages import Admit, Cancel, Failed, LeaderLost, MemberLost, Message
from decoding.blending.params import EnsembleOptions
from decoding.sampling.params import SamplingParams
from tests.support.coordinator_stage import PROMPT, Stage, admitted, commit, decode, reports


def submit_ensemble(stage: Stage, **options: Any) -> list[Delta]:
    """Submit a request whose ensemble consists of the target's model and the drafter's."""
    endpoint = Endpoint("e", "big", None, 0, decode, members=["small"], ensemble=EnsembleOptions(**options))
    deltas: list[Delta] = []
    stage.coordinator.submit(Request(endpoint, PROMPT, SamplingParams(max_tokens=50), request_id=1), deltas.append)
    stage.turn()
    return deltas


def members_of(messages: list[Message]) -> list[list[str | None]]:
    ensembles = [message.ensemble for message in messages if isinstance(message, Admit) and message.ensemble]
    return [
        [None if member.address is None else member.address.name for member in ensemble.members]
        for ensemble in ensembles
    ]


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
    stage.set_replicas("t1")  # no replica is left, so the request waits
    for _ in range(5):
        stage.turn(later_s=1)
        stage.say("t1", reports())
    stage.set_replicas("t1", "d3")
    assert members_of(stage.received("t1")) == [["d3"]]
    assert deltas[-1].error is None


def test_an_ensemble_drops_a_member_if_its_policy_permits(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    submit_ensemble(stage, on_member_failure="drop")
    stage.received("t1")
    stage.set_replicas("t1")
    for _ in range(5):
        stage.turn(later_s=1)
        stage.say("t1", reports(1, drafter=None))
    assert stage.received("t1") == [MemberLost(1, "d1")]


def test_an_ensemble_whose_member_took_too_long_starts_again(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = submit_ensemble(stage)
    for admission in range(3):
        stage.say("t1", Failed(1, "member 'small' took too long", admission=admission))
        assert deltas == []
    stage.say("t1", Failed(1, "member 'small' took too long", admission=3))
    assert "took too long" in str(deltas[-1].error)


def test_members_are_told_when_a_request_leaves_its_leader(stage: Stage) -> None:
    """The leader may be dead, and its rows would hold the members' slots until its silence is noticed."""
    stage.set_replicas("t1", "d1")
    submit_ensemble(stage)
    assert stage.received("d1") == []
    stage.set_replicas("t1", "t2", "d1")
    stage.set_replicas("t2", "d1")
    assert stage.received("d1") == [LeaderLost(1, "t1", 0)]
    assert members_of(stage.received("t2")) == [["d1"]]
    stage.coordinator.cancel(1)
    stage.turn()
    assert stage.received("d1") == [LeaderLost(1, "t2", 1)]
