"""Contestants, the workload that each gets, and their turns: only one computes at a time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.coordinator.request import Statistics
from actors.loops.thread import LoopTimes
from benchmarks.processes import Pausable
from decoding.sampling.params import SamplingParams

# From "alternation" on, Consort.
Kind = Literal["hf", "hf-assisted", "vllm", "alternation", "plain", "fixed", "adaptive", "colocated"]
_WARM_UP_TOKENS = 16
_SETTLING_S = 0.1  # for resumed processes to handle the messages that they missed


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, its answer and the sampling parameters."""

    prompt: list[int]
    answer: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids. Each answer has exactly `new_tokens` tokens, because no contestant stops at EOS."""

    prompts: Sequence[list[int]]
    new_tokens: int
    temperature: float = 0.0
    streams: int = 1  # concurrent prompts

    def part(self, start: int, count: int) -> "Workload":
        """Return a workload of `count` prompts from `start` on, wrapping around."""
        chosen = [self.prompts[(start + i) % len(self.prompts)] for i in range(count)]
        return Workload(chosen, self.new_tokens, self.temperature, self.streams)

    def batches(self) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
        """Yield `streams` prompts at a time, with their parameters. The seed of a prompt is its index."""
        for start in range(0, len(self.prompts), self.streams):
            prompts = list(self.prompts[start : start + self.streams])
            yield prompts, [self.params(start + i) for i in range(len(prompts))]

    def texts(self, answers: Sequence[list[int]]) -> list[Text]:
        pairs = zip(self.prompts, answers, strict=True)
        return [Text(prompt, answer, self.params(i)) for i, (prompt, answer) in enumerate(pairs)]

    def params(self, index: int) -> SamplingParams:
        """Return the parameters of a prompt."""
        return SamplingParams(max_tokens=self.new_tokens, temperature=self.temperature, seed=index)


@dataclass(frozen=True, slots=True)
class Activity:
    """Statistics of speculation, and the times of the models' loops; zeros if a contestant does not report them."""

    statistics: Statistics = field(default_factory=Statistics)
    target: LoopTimes = field(default_factory=LoopTimes)
    drafter: LoopTimes = field(default_factory=LoopTimes)

    def __add__(self, other: "Activity") -> "Activity":
        return Activity(self.statistics + other.statistics, self.target + other.target, self.drafter + other.drafter)


class Contestant:
    """One way to answer prompts."""

    def __init__(
        self, group: str, how: str, kind: Kind, hosts: Sequence[Pausable] = (), *, draft_length: int | None = None
    ) -> None:
        """
        group, how: the name. Contestants of one group and kind differ only in their draft length.
        hosts: run while the contestant does, and are paused otherwise.
        draft_length: γ; None if there is none, or if it is not constant.
        """
        self.group, self.kind, self.hosts, self.draft_length = group, kind, hosts, draft_length
        self.name = f"{group}, {how}"

    def takes_part(self, workload: Workload) -> bool:
        """Whether the contestant can run the workload."""
        return True

    def run(self, workload: Workload) -> list[list[int]]:
        """Return the answers, one per prompt, as token ids. This call is timed."""
        raise NotImplementedError

    def activity(self) -> Activity:
        """Return the activity since the last call."""
        return Activity()


@dataclass(slots=True)
class Record:
    """What a contestant did in all repetitions of one workload."""

    contestant: Contestant
    tokens_per_s: list[float] = field(default_factory=list)  # one per repetition
    texts: list[Text] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)


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
    """Run the contestants that can run the workload. Each repetition starts with another one.

    All hosts must be paused, and are paused again afterwards.

    Args:
        repetitions: the most.
        prompts: new ones in each repetition, of the workload's.
        report: receives a line per repetition.
        before_each: called before each repetition, while all contestants are paused.
        until_s: time on the monotonic clock after which no further repetition begins.
    """
    records = [Record(contestant) for contestant in contestants if contestant.takes_part(workload)]
    last = workload.prompts[-workload.streams :]
    for record in records:
        _take_turn(record.contestant, Workload(last, _WARM_UP_TOKENS, workload.temperature, workload.streams))
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
