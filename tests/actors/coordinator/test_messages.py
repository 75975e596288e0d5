"""How a coordinator handles messages that are lost, late or duplicated."""

import pytest
from msgspec import structs

from actors.wire.messages import Admit, AttachDrafter, Beams, Cancel, Failed
from tests.support.coordinator_stage import PROMPT, Stage, admitted, commit, reports, tokens_of


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
    stage.say("t1", commit(7, 9))  # sent before it received Cancel
    assert stage.received("t1") == []
    stage.say("t1", commit(4, 6, admission=1))
    assert tokens_of(deltas) == [5, 6]


def test_a_commit_that_overlaps_the_text_starts_the_request_again(stage: Stage) -> None:
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5, 6))
    stage.received("t1")
    stage.say("t1", commit(4, 9, 9))
    assert tokens_of(deltas) == [5, 6]
    assert admitted(stage.received("t1")) == [[*PROMPT, 5, 6]]


def test_an_admission_does_not_change_when_the_text_grows(stage: Stage) -> None:
    """Local links pass the object itself on, and its receiver may read it late."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 5))
    assert admitted(stage.received("d1")) == [PROMPT]


@pytest.mark.parametrize("tokens", [[5, 6], [5, 9]], ids=["the same", "another"])
def test_a_commit_of_an_earlier_admission_to_the_same_target_is_ignored(stage: Stage, tokens: list[int]) -> None:
    """Under rejection sampling each admission may continue the text differently."""
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.set_replicas("t2")
    stage.say("t2", commit(3, 4, admission=1))
    stage.set_replicas("t1")
    assert [message.admission for message in stage.received("t1") if isinstance(message, Admit)] == [0, 2]
    stage.say("t1", commit(3, 4), commit(4, *tokens))
    assert stage.received("t1") == []  # no Cancel: that would end the current admission
    stage.say("t1", commit(4, 5, 9, admission=2))
    assert tokens_of(deltas) == [4, 5, 9]


@pytest.mark.parametrize("stale", [Failed(1, "no room"), Beams(1, [], 3)], ids=["a failure", "an answer"])
def test_an_end_of_an_earlier_admission_to_the_same_target_is_ignored(stage: Stage, stale: Failed | Beams) -> None:
    stage.set_replicas("t1")
    deltas = stage.submit()
    stage.set_replicas("t2")
    stage.set_replicas("t1")
    stage.received("t1")
    stage.say("t1", stale)
    assert deltas == []
    assert stage.received("t1") == []
    stage.say("t1", structs.replace(stale, admission=2))
    assert len(deltas) == 1


def test_a_drafters_failure_for_an_earlier_admission_is_ignored(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.set_replicas("t2", "d1")
    stage.received("d1")
    stage.say("d1", Failed(1, "no room"))
    assert stage.received("d1") == []
    stage.say("d1", Failed(1, "no room", admission=1))
    assert stage.received("d1") == [Cancel(1)]


def test_a_drafter_that_failed_starts_again(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 20))
    stage.received("t1"), stage.received("d1")
    stage.say("d1", Failed(1, "the text can't be read"))
    stage.turn(later_s=1)
    assert stage.received("t1") == [AttachDrafter(1, None), AttachDrafter(1, "d1")]
    assert admitted(stage.received("d1")) == [[*PROMPT, 20]]


def test_a_request_that_its_target_does_not_know_starts_again(stage: Stage) -> None:
    """Either its admission was lost, or the commit that ended it."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("t1", commit(3, 20))
    stage.received("t1")
    stage.say("t1", reports())
    stage.turn(later_s=1)
    assert admitted(stage.received("t1")) == []  # the report may have crossed Admit
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


def test_a_target_with_a_wrong_drafter_gets_attach_drafter_again(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.received("t1")
    for _ in range(2):  # the first may have crossed AttachDrafter
        assert stage.received("t1") == []
        stage.say("t1", reports(1, drafter="d0"))
    assert stage.received("t1") == [AttachDrafter(1, "d1")]
    stage.say("t1", reports(1))
    assert stage.received("t1") == []


def test_unknown_requests_on_a_replica_are_cancelled(stage: Stage) -> None:
    """A drafter that was given up and came back still has rows that hold slots."""
    stage.set_replicas("t1", "d1")
    stage.submit()
    stage.say("d1", reports(1, 77))
    assert Cancel(77) in stage.received("d1")


def test_a_drafter_that_keeps_failing_is_not_attached_for_ever(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit()
    admissions = 0
    for _ in range(20):
        admissions += len(admitted(stage.received("d1")))
        stage.say("d1", Failed(1, "no"))
        stage.turn(later_s=1)
    assert 1 < admissions < 10
