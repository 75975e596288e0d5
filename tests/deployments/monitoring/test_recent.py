"""How requests fared lately, and how it reaches the policy."""

from actors.loops.thread import LoopTimes
from actors.wire.messages import Report
from deployments.monitoring.metrics import RecentSpeeds
from deployments.monitoring.replica_metrics import LoadMeter
from deployments.scaling.policy import Felt


def test_the_slow_tenth_of_the_last_half_minute_counts() -> None:
    now_s = [0.0]
    recent = RecentSpeeds(lambda: now_s[0])
    assert recent.felt() == Felt()
    for number in range(10):
        recent.note_first(0.1 + number)
        recent.note_answer(30.0 - number, 100, 40)
    assert recent.felt() == Felt(9.1, 21.0, 0.4)
    now_s[0] = 31.0
    assert recent.felt() == Felt()


def test_a_few_requests_tell_nothing() -> None:
    recent = RecentSpeeds()
    for _ in range(4):
        recent.note_first(9.0)
    assert recent.felt() == Felt()


def test_the_worst_of_all_coordinators_counts() -> None:
    meter = LoadMeter()
    meter.note_coordinator("one", 0, Felt(0.2, 30.0, 0.5))
    meter.note_coordinator("two", 0, Felt(0.4, 0.0, 0.25))
    load = meter.measure(Report(3, 0, 16, []), LoopTimes())
    assert (load.ttft_s, load.tokens_per_s, load.drafted) == (0.4, 30.0, 0.5)
    alone = LoadMeter().measure(Report(3, 0, 16, []), LoopTimes())
    assert (alone.ttft_s, alone.tokens_per_s, alone.drafted) == (0.0, 0.0, 1.0)
