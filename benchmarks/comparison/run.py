"""Runs one comparison, from contestants to findings. Must not know the machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comparison.findings import Score, Speculation, find_doubts, median_times, score, speculation
from benchmarks.comparison.interleave import Record, interleave
from benchmarks.comparison.sameness import Sameness, compare_texts
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.hosts import Host
from benchmarks.peers.huggingface import HuggingFace
from benchmarks.peers.replica import Times
from benchmarks.peers.workload import Workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """Findings of one workload."""

    temperature: float
    streams: int
    scores: Sequence[Score]
    speculations: Sequence[Speculation]
    times: Mapping[str, Times]  # by group of contestants: medians over the repetitions
    times_by_repetition: Sequence[Mapping[str, Times]]
    doubts: Sequence[str]  # reasons why times, and limits computed from them, are unreliable


def run_comparison(
    contestants: Sequence[Contestant],
    workload: Workload,
    *,
    models: Host[HuggingFace],
    measure: Callable[[], Mapping[str, Times]],
    repetitions: int,
    prompts: int,
    report: Callable[[str], None],
    until_s: float = math.inf,
) -> Comparison:
    """Run all contestants, and analyse their records.

    Args:
        contestants: among them the kinds "hf" and "plain".
        workload: prompts for all repetitions, and settings.
        models: judge texts and agreement.
        measure: returns step times by group, before every repetition. Other groups are given those of the first group.
        repetitions: maximum number of repetitions.
        prompts: number of new prompts per repetition.
        report: receives a line per repetition.
        until_s: time on the monotonic clock after which no further repetition begins.
    """
    measured: list[Mapping[str, Times]] = []
    records = interleave(
        contestants,
        workload,
        repetitions=repetitions,
        prompts=prompts,
        report=report,
        before_each=lambda: measured.append(measure()),
        until_s=until_s,
    )
    times = {group: median_times([by_group[group] for by_group in measured]) for group in measured[0]}
    by_kind = {record.contestant.kind: record for record in records}
    models.resume()
    scores = score(records, lambda record: _sameness(record, by_kind["hf"], by_kind["plain"], models))
    speculations = []
    for record in records:
        if record.contestant.kind in ("alternation", "fixed", "adaptive", "colocated"):
            agreements = [models.call(HuggingFace.agreement, text) for text in record.texts]
            group_times = times.get(record.contestant.group, next(iter(times.values())))
            speculations.append(speculation(record, by_kind["plain"], agreements, group_times))
    models.pause()
    doubts = find_doubts(measured, by_kind["plain"].activity.target)
    return Comparison(workload.temperature, workload.streams, scores, speculations, times, measured, doubts)


def _sameness(record: Record, hf: Record, plain: Record, models: Host[HuggingFace]) -> Sameness | None:
    """Compare greedy texts with `generate`, sampled ones with plain Consort: others draw other random numbers."""
    if record.texts[0].params.greedy:
        return compare_texts(record.texts, hf.texts, models)
    if record.contestant.kind in ("hf", "hf-assisted", "vllm"):
        return None
    return compare_texts(record.texts, plain.texts, models)
