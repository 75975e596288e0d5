"""One comparison, from contestants to findings; the same for every machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.comparison.findings import Score, Speculation, find_doubts, score, speculation, typical
from benchmarks.comparison.interleave import Record, interleave
from benchmarks.comparison.sameness import Sameness, compare
from benchmarks.peers.contestant import Contestant
from benchmarks.peers.hosts import Host
from benchmarks.peers.huggingface import HuggingFace
from benchmarks.peers.replica import Times
from benchmarks.peers.workload import Workload


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload's findings."""

    temperature: float
    streams: int
    scores: Sequence[Score]
    speculations: Sequence[Speculation]
    times: Mapping[str, Times]  # by group of contestants: medians over the repetitions
    times_by_repetition: Sequence[Mapping[str, Times]]
    doubts: Sequence[str]  # why limits that follow from the times are not to be believed; empty: no reason found


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
    """
    until_s: on the monotonic clock, when no further repetition is begun.
    models: what judges texts and agreement.
    measure: step times by group, taken before every repetition; the first group stands for those that are not in it.
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
    times = {group: typical([each[group] for each in measured]) for group in measured[0]}
    by_kind = {record.contestant.kind: record for record in records}
    models.resume()
    scores = score(records, lambda record: _sameness(record, by_kind["hf"], by_kind["plain"], models))
    speculations = []
    for record in records:
        if record.contestant.kind in ("alternation", "fixed", "adaptive", "inside"):
            agreements = [models.call(HuggingFace.agreement, text) for text in record.texts]
            of_group = times.get(record.contestant.group, next(iter(times.values())))
            speculations.append(speculation(record, by_kind["plain"], agreements, of_group))
    models.pause()
    doubts = find_doubts(measured, by_kind["plain"].activity.target)
    return Comparison(workload.temperature, workload.streams, scores, speculations, times, measured, doubts)


def _sameness(record: Record, hf: Record, plain: Record, models: Host[HuggingFace]) -> Sameness | None:
    """Greedy texts are compared with `generate`; sampled ones with ours, as others draw other random numbers."""
    if record.texts[0].params.greedy:
        return compare(record.texts, hf.texts, models)
    if record.contestant.kind in ("hf", "hf-assisted", "vllm"):
        return None
    return compare(record.texts, plain.texts, models)
