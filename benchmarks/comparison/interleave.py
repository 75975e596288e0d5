"""Interleaved runs: in each repetition every contestant takes a turn, and only one computes at a time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.contestant import Activity, Contestant
from benchmarks.peers.workload import Text, Workload

_WARM_UP_TOKENS = 16
_SETTLING_S = 0.1  # for resumed processes to handle the messages that they missed


@dataclass(slots=True)
class Record:
    """Results of one contestant in all repetitions of one workload."""

    contestant: Contestant
    tokens_per_s: list[float] = field(default_factory=list)  # one per repetition
    texts: list[Text] = field(default_factory=list)  # of all repetitions
    activity: Activity = field(default_factory=Activity)  # of all repetitions


def interleave(
    contestants: Sequence[Contestant],
    workload: Workload,
    *,
    repetitions: int,
    prompts: int,
    report: Callable[[str], None] = print,
    before_each: Callable[[], None] = lambda: None,
    until_s: float = math.inf,
) -> list[Record]:
    """Run the contestants that can run the workload. Each repetition starts with another contestant.

    The hosts of all contestants must be paused, and are paused again afterwards.

    Args:
        contestants: all of them.
        workload: prompts for all repetitions, and settings.
        repetitions: maximum number of repetitions.
        prompts: number of new prompts per repetition.
        report: receives a line per repetition.
        before_each: called before each repetition, while all contestants are paused.
        until_s: time on the monotonic clock after which no further repetition begins.
    """
    records = [Record(contestant) for contestant in contestants if contestant.takes_part(workload)]
    for record in records:
        warm_up = Workload(
            workload.prompts[-workload.streams :], _WARM_UP_TOKENS, workload.temperature, workload.streams
        )
        _take_turn(record.contestant, warm_up)
    for repetition in range(repetitions):
        if repetition and time.monotonic() > until_s:
            report(f"no time for more than {repetition} of {repetitions} repetitions")
            break
        before_each()
        part = workload.part(repetition * prompts, prompts)
        first = repetition % len(records)
        for record in (*records[first:], *records[:first]):
            answers, seconds, activity = _take_turn(record.contestant, part)
            record.tokens_per_s.append(sum(map(len, answers)) / seconds)
            record.texts += part.texts(answers)
            record.activity += activity
        latest = ", ".join(f"{record.contestant.name} {record.tokens_per_s[-1]:.1f}" for record in records)
        report(f"repetition {repetition + 1} of {repetitions}: {latest}")
    return records


def _take_turn(contestant: Contestant, workload: Workload) -> tuple[list[list[int]], float, Activity]:
    """Return answers, seconds and activity."""
    for host in contestant.hosts:
        host.resume()
    time.sleep(_SETTLING_S)
    try:
        began_s = time.perf_counter()
        answers = contestant.run(workload)
        seconds = time.perf_counter() - began_s
        return answers, seconds, contestant.activity()
    finally:
        for host in contestant.hosts:
            host.pause()
