"""Which weights a coordinator lets requests run with, and which replicas get them."""

import pytest
from msgspec.structs import replace

from actors.coordinator.request import Delta, Request, Term
from actors.wire.messages import Admit, Cancel, Message, SetWeights, Weights, WeightsState
from decoding.errors import UnavailableError
from decoding.sampling.params import SamplingParams
from tests.support.coordinator_stage import ENDPOINT, PROMPT, Stage, commit, reports, tokens_of

ONE, TWO = Weights("1-aa", "/one"), Weights("2-bb", "/two")


@pytest.fixture
def stage() -> Stage:
    return Stage(replaceable={"big", "small"})


def state(weights: Weights, *request_ids: int, unfit: str = "", rest: int = 0) -> Message:
    report = reports(*request_ids, drafter=None)
    return replace(report, weights=WeightsState(weights, unfit, "no memory" if unfit else "", rest=rest))


def admissions(messages: list[Message]) -> list[tuple[str, list[int], str]]:
    return [(each.weights.version, each.tokens, each.cache_salt) for each in messages if isinstance(each, Admit)]


def set_weights(stage: Stage, weights: Weights, *, recompute: bool = False) -> None:
    stage.coordinator.set_weights("big", weights, recompute=recompute)
    stage.turn()


def test_what_has_begun_ends_with_its_weights_and_what_waits_gets_the_new(stage: Stage) -> None:
    stage.set_replicas("t1")
    begun, waiting = stage.submit(1), stage.submit(2)
    stage.say("t1", commit(3, 5))
    assert admissions(stage.received("t1")) == [("0", PROMPT, "")] * 2
    set_weights(stage, ONE)
    messages = stage.received("t1")
    assert messages[:2] == [SetWeights(ONE), Cancel(2)]
    assert admissions(messages) == [("1-aa", PROMPT, "weights 1-aa ")]
    stage.say("t1", commit(4, 6, finish="length"), commit(3, 7, request_id=2, admission=1, finish="length"))
    assert [delta.weights for delta in begun] == ["0", "0"]
    assert (waiting[0].weights, tokens_of(waiting)) == ("1-aa", [7])


@pytest.mark.parametrize("streamed", [False, True])
def test_recomputing_takes_back_what_nobody_has_seen(stage: Stage, streamed: bool) -> None:
    stage.set_replicas("t1")
    deltas = stage.submit(1, streamed=streamed)
    stage.say("t1", commit(3, 5))
    stage.received("t1")
    set_weights(stage, ONE, recompute=True)
    if streamed:
        assert stage.received("t1") == [SetWeights(ONE)]
        return
    assert admissions(stage.received("t1")) == [("1-aa", PROMPT, "weights 1-aa ")]
    stage.say("t1", commit(4, 6))  # of the admission before
    assert (deltas[-1].restarts, deltas[-1].tokens, deltas[-1].statistics.committed) == (True, (), 0)
    stage.say("t1", commit(3, 7, admission=1, finish="length"))
    assert (deltas[-1].weights, deltas[-1].text, deltas[-1].statistics.steps) == ("1-aa", "h", 1)


def test_a_request_that_loses_its_target_keeps_its_weights(stage: Stage) -> None:
    stage.set_replicas("t1")
    stage.submit(1)
    stage.say("t1", commit(3, 5))
    set_weights(stage, ONE)
    stage.set_replicas("t2")
    assert admissions(stage.received("t2")) == [("0", [*PROMPT, 5], "")]


def test_replicas_that_come_later_get_the_current_weights(stage: Stage) -> None:
    stage.set_replicas("t1", "d1")
    set_weights(stage, ONE)
    stage.say("t1", state(ONE))
    stage.set_replicas("t1", "t2", "d1")
    stage.received("t1")
    stage.say("t2", state(Weights()))
    stage.say("t1", state(ONE))
    assert (stage.received("t1"), stage.received("t2")) == ([], [SetWeights(ONE)])
    stage.submit(1)
    assert admissions(stage.received("t1")) == [("1-aa", PROMPT, "weights 1-aa ")]  # it has them already
    assert not any(isinstance(message, SetWeights) for message in stage.received("d1"))


def test_a_coordinator_learns_from_replicas_what_another_has_loaded(stage: Stage) -> None:
    stage.set_replicas("t1")
    stage.say("t1", state(TWO))
    assert stage.coordinator.weights("big") == TWO
    set_weights(stage, ONE)  # older
    assert stage.coordinator.weights("big") == TWO
    assert stage.coordinator.weights("other") is None


@pytest.mark.parametrize("names", [("t1",), ("t1", "t2")], ids=["alone", "beside another"])
def test_requests_leave_a_replica_that_cannot_load_their_weights(stage: Stage, names: tuple[str, ...]) -> None:
    stage.set_replicas(*names)
    set_weights(stage, ONE)
    deltas = stage.submit(1)
    first = next(name for name in names if admissions(stage.received(name)))
    stage.say(first, state(Weights(), 1, unfit=ONE.version))
    for name in names:
        assert len(admissions(stage.received(name))) == (name != first)
    set_weights(stage, TWO)
    if len(names) == 1:  # it has waited for a replica that can
        stage.turn(later_s=1.0)
        assert admissions(stage.received(first)) == [("2-bb", PROMPT, "weights 2-bb ")]
    assert not deltas


def test_a_version_without_a_replica_fails_in_time(stage: Stage) -> None:
    stage.set_replicas("t1")
    set_weights(stage, ONE)
    deltas = stage.submit(1)
    stage.say("t1", state(Weights(), 1, unfit=ONE.version))
    for _ in range(130):
        stage.say("t1", state(Weights(), unfit=ONE.version))
        stage.turn(later_s=1.0)
    assert isinstance(deltas[-1].error, UnavailableError)


def test_a_model_that_sleeps_gets_no_requests(stage: Stage) -> None:
    stage.set_replicas("t1")
    begun = stage.submit(1)
    stage.coordinator.set_rest("big", 1)
    stage.turn()
    assert SetWeights(Weights(), 1) in stage.received("t1")
    (refused,) = stage.submit(2)
    assert str(refused.error) == "the model 'big' sleeps; POST /v1/wake wakes it"
    stage.say("t1", commit(3, 5, finish="length"))
    assert tokens_of(begun) == [5]
    stage.coordinator.set_rest("big", 2)
    stage.turn()
    assert stage.received("t1")[-1] == SetWeights(Weights(), 2)
    assert not stage.submit(3)


def test_sleep_and_wake_are_repeated_until_a_replica_has_heard_of_them(stage: Stage) -> None:
    stage.set_replicas("t1")
    for rest in (1, 2):
        stage.coordinator.set_rest("big", rest)
        stage.turn()
        assert stage.received("t1") == [SetWeights(Weights(), rest)]
        for _ in range(2):  # it was lost
            stage.say("t1", state(Weights(), rest=rest - 1))
            assert stage.received("t1") == [SetWeights(Weights(), rest)]
        stage.say("t1", state(Weights(), rest=rest))
        assert not stage.received("t1")


def test_a_coordinator_learns_from_replicas_what_another_lets_sleep(stage: Stage) -> None:
    stage.set_replicas("t1", "t2")
    stage.say("t1", state(Weights(), rest=1))
    assert stage.received("t2") == [SetWeights(Weights(), 1)]
    assert isinstance(stage.submit(1)[0].error, UnavailableError)
    stage.say("t2", state(Weights(), rest=2))
    assert stage.received("t1")[-1] == SetWeights(Weights(), 2)
    assert not stage.submit(2)


@pytest.mark.parametrize(("term", "refused"), [(Term(name="small"), True), (Term(name="own", is_own=True), False)])
def test_a_text_of_several_models_with_versions_is_refused(stage: Stage, term: Term, refused: bool) -> None:
    stage.set_replicas("t1", "d1")
    deltas: list[Delta] = []
    asked = Request(ENDPOINT, PROMPT, SamplingParams(max_tokens=4), terms=(term,), request_id=7)
    stage.coordinator.submit(asked, deltas.append)
    stage.turn()
    assert [str(delta.error).split(",")[0] for delta in deltas] == ["formula: 'big' has weights_at_run_time"] * refused
