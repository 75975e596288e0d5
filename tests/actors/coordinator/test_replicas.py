"""How a coordinator handles replicas that come, go, hang and die."""

import pytest

from actors.coordinator.request import Delta, Request
from actors.wire.link import Envelope
from actors.wire.messages import Admit, AttachDrafter, Cancel, Heartbeat, Message, Report
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from tests.support.coordinator_stage import ENDPOINT, PROMPT, Stage, admitted, commit, reports, tokens_of


def test_a_lost_target_is_replaced_and_the_stream_goes_on(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.say("t1", commit(3, 5, 6))
    stage.set_replicas("t2", "d1")
    assert stage.received("t2") == [
        Admit(
            1,
            [*PROMPT, 5, 6],
            3,
            SamplingParams(max_tokens=50),
            4,
            drafter=True,
            target=stage.replicas["t2"].address,
            attached_drafter="d1",
            admission=1,
        )
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


def test_a_lost_drafter_is_replaced_while_the_stream_goes_on(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    stage.received("t1")
    stage.set_replicas("t1")
    assert stage.received("t1") == [AttachDrafter(1, None)]
    stage.say("t1", commit(3, 5))
    assert tokens_of(deltas) == [5]
    stage.set_replicas("t1", "d2")
    assert admitted(stage.received("d2")) == [[*PROMPT, 5]]
    assert stage.received("t1") == [AttachDrafter(1, "d2")]


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
    assert admitted(stage.received("t1")) == [PROMPT]  # the coordinator treats it as a new replica


def test_a_coordinator_that_was_stopped_does_not_count_that_time_as_silence(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.set_replicas("t1", "d1")
    deltas = stage.submit()
    receive = stage.link.receive

    def sleep(timeout_s: float) -> list[Envelope]:
        stage.now_s += 50.0  # as after Ctrl-Z and `fg`
        return receive(timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(stage.link, "receive", sleep)
        stage.turn()
    stage.say("t1", commit(3, 5))
    assert tokens_of(deltas) == [5]


def test_a_coordinator_stopped_while_handling_a_message_does_not_count_that_time_as_silence(stage: Stage) -> None:
    deltas: list[Delta] = []

    def sink(delta: Delta) -> None:
        stage.now_s += 50.0
        deltas.append(delta)

    stage.set_replicas("t1", "d1")
    stage.coordinator.submit(Request(ENDPOINT, PROMPT, SamplingParams(max_tokens=50), request_id=1), sink)
    stage.turn()
    stage.say("t1", commit(3, 5))
    stage.say("t1", commit(4, 6))
    assert tokens_of(deltas) == [5, 6]


def test_a_hung_target_loses_its_requests_and_its_late_commits_are_ignored(stage: Stage) -> None:
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


def test_if_all_targets_hang_requests_stay_and_new_ones_are_assigned(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    stage.submit(1)
    stage.turn(later_s=6)
    stage.submit(2)
    stage.turn(later_s=6)
    assert [message.request_id for message in stage.received("t1") if isinstance(message, Admit)] == [1, 2]


def test_a_healthy_target_may_be_silent_for_longer(stage: Stage) -> None:
    """A long prefill is no hang: the process still passes health checks. So does one whose link is cut."""
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


def test_permitted_silence_grows_with_the_longest_silence(stage: Stage) -> None:
    stage.set_replicas("t1")
    stage.submit()
    for second in range(26):  # shorter than max_silence_s after the report
        stage.turn(later_s=1)
        stage.set_replicas("t1", "t2")
        stage.say("t2", reports())
        if second == 7:
            stage.say("t1", reports(1))
    assert admitted(stage.received("t2")) == []


def test_requests_move_off_a_withdrawn_replica(stage: Stage) -> None:
    stage.set_replicas("t1", "d1", "d2")
    stage.submit()
    first, second = sorted(("d1", "d2"), key=lambda name: -len(admitted(stage.received(name))))
    stage.received("t1")
    stage.set_replicas("t1", second)
    assert stage.received(first) == [Cancel(1)]
    assert admitted(stage.received(second)) == [PROMPT]
    assert stage.received("t1") == [AttachDrafter(1, second)]
    stage.set_replicas("t2", second)
    assert stage.received("t1") == [Cancel(1)]
    assert admitted(stage.received("t2")) == [PROMPT]


def test_a_request_is_moved_as_often_as_replicas_are_withdrawn(stage: Stage) -> None:
    """None is lost, so it is not given up."""
    stage.set_replicas("t0")
    deltas = stage.submit(speculate=False)
    for index in range(1, 9):
        stage.set_replicas(f"t{index}")
        assert admitted(stage.received(f"t{index}")) == [PROMPT]
    assert deltas == []


def test_a_withdrawn_replica_is_disconnected_once_it_is_drained(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that it could miss Cancel."""
    disconnected: list[str] = []
    monkeypatch.setattr(stage.link, "disconnect", disconnected.append)
    stage.set_replicas("t1")
    stage.submit()
    stage.set_replicas("t1", "t2")
    stage.set_replicas("t2")
    assert Cancel(1) in stage.received("t1")
    for _ in range(2):  # the first may have crossed Cancel; if that was lost, another follows
        stage.say("t1", reports(1))
        stage.turn(later_s=1)
        assert Cancel(1) in stage.received("t1")
    assert disconnected == []
    stage.say("t1", reports())
    stage.turn(later_s=1)
    assert disconnected == ["t1"]


def test_a_replica_that_is_given_up_gets_cancel_before_it_is_disconnected(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[list[Message]] = []
    monkeypatch.setattr(stage.link, "disconnect", lambda name: received.append(stage.received(name)))
    stage.set_replicas("t1")
    stage.submit()
    stage.turn(later_s=30)
    assert received == [
        [Admit(1, PROMPT, 3, SamplingParams(max_tokens=50), 4, False, target=stage.replicas["t1"].address), Cancel(1)]
    ]


def test_a_withdrawn_replica_finishes_requests_that_no_other_can_take(stage: Stage) -> None:
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


def test_a_request_that_keeps_losing_targets_fails(stage: Stage) -> None:
    deltas = stage.submit()
    for number in range(10):
        stage.set_replicas(f"t{number}")
        stage.turn(later_s=2)
    assert isinstance(deltas[-1].error, UnavailableError)
    assert "4 target replicas were lost" in str(deltas[-1].error)


def test_a_request_that_makes_progress_may_lose_any_number_of_targets(stage: Stage) -> None:
    deltas = stage.submit(max_tokens=1000)
    for number in range(8):
        stage.set_replicas(f"t{number}")
        stage.say(f"t{number}", commit(3 + 20 * number, *range(20), admission=number))
    assert [delta.error for delta in deltas] == [None] * 8


def settle(stage: Stage, reported: dict[str, Report]) -> None:
    """Let every replica report until its load counts as known."""
    for _ in range(3):
        for name, report in reported.items():
            stage.say(name, report)
        stage.turn(later_s=1)


def test_a_new_drafter_takes_over_half_of_the_requests(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    ids = (1, 2)
    for request_id in ids:
        stage.submit(request_id)
    stage.set_replicas("t1", "d1", "d2")
    stage.received("t1")
    settle(stage, {"t1": reports(*ids), "d1": reports(*ids), "d2": reports()})
    (moved,) = [message.request_id for message in stage.received("d2") if isinstance(message, Admit)]
    assert Cancel(moved) in stage.received("d1")
    (kept,) = set(ids) - {moved}
    assert stage.received("t1") == [AttachDrafter(moved, "d2")]
    settle(stage, {"t1": reports(*ids), "d1": reports(kept), "d2": reports(moved)})
    assert stage.received("d1") == stage.received("d2") == []


def test_a_new_target_takes_over_requests_that_wait_for_a_slot(stage: Stage) -> None:
    stage.set_replicas("t1")
    ids = (1, 2, 3)
    for request_id in ids:
        stage.submit(request_id)
    stage.set_replicas("t1", "t2")
    busy = Report(active=2, waiting=1, slots=2, request_ids=list(ids), own_waiting=1)
    settle(stage, {"t1": busy, "t2": Report(active=0, waiting=0, slots=2, request_ids=[])})
    assert [message.request_id for message in stage.received("t2") if isinstance(message, Admit)] == [3]


def test_all_replicas_get_heartbeats(stage: Stage) -> None:
    """Idle ones report in return, so a hung one is known before it gets work."""
    stage.set_replicas("t1", "t2")
    for name in stage.replicas:
        stage.replicas[name].received()
    stage.turn(later_s=3)
    assert [stage.replicas[name].received() for name in ("t1", "t2")] == [[Heartbeat()], [Heartbeat()]]
