"""Analyses the records of a comparison: scores, ratios, and the speed-up relative to its limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from torch import Tensor

from actors.loops.thread import LoopTimes
from benchmarks.comparison.interleave import Record
from benchmarks.comparison.sameness import Sameness
from benchmarks.peers.contestant import Activity, Kind
from benchmarks.peers.replica import Sweep, Times
from evaluation.limits import SpeculationLimits, accepted_lengths, tokens_per_step

REFERENCES: tuple[Kind, ...] = ("hf", "vllm", "hf-assisted", "plain")  # of several contestants of a kind, the fastest
_DOUBTFUL = 1.5  # ratio of two times of the same step above which they are unreliable


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one contestant in one workload."""

    name: str
    group: str
    kind: Kind
    draft_length: int | None  # γ, if it is constant
    tokens_per_s: Sequence[float]  # one per repetition
    median: float
    ratios: dict[Kind, float]  # to each reference; medians over the repetitions
    sameness: Sameness | None  # None: no contestant draws the same random numbers
    activity: Activity


@dataclass(frozen=True, slots=True)
class Speculation:
    """The speed-up of a contestant that drafts, and its limits. An adaptive one has the limits of the best γ."""

    name: str
    limits: SpeculationLimits
    agreement: float  # α: share of positions at which the drafter samples the target's token
    hidden_limit: float  # S*
    alternating_limit: float  # S, without transport
    speed_up: float  # achieved, over our own plain decoding
    of_limit: float  # achieved / S*
    acceptance_rate: float  # accepted / drafted
    hit_rate: float  # share of rejections after which the next draft already existed
    acceptance_length: float  # tokens committed per target step
    verify_step_s: float  # mean of the target's steps during the comparison
    draft_step_s: float  # mean of the drafter's steps
    waited_share: float  # share of the target's busy time in which it waited for drafts


def score(records: Sequence[Record], sameness: Callable[[Record], Sameness | None]) -> list[Score]:
    """Return the score of every record."""
    references: dict[Kind, Record] = {}
    for kind in REFERENCES:
        candidates = [record for record in records if record.contestant.kind == kind]
        if candidates:
            references[kind] = max(candidates, key=lambda record: median(record.tokens_per_s))
    return [
        Score(
            record.contestant.name,
            record.contestant.group,
            record.contestant.kind,
            record.contestant.draft_length,
            record.tokens_per_s,
            median(record.tokens_per_s),
            {kind: _ratio(record, reference) for kind, reference in references.items()},
            sameness(record),
            record.activity,
        )
        for record in records
    ]


def speculation(record: Record, plain: Record, agreements: Sequence[Tensor], times: Times) -> Speculation:
    """Compare the achieved speed-up of a contestant that drafts with its limits.

    agreements: [N] bool for each text of the record.
    """
    fixed = record.contestant.draft_length
    choices = [tokens - 1 for tokens in times.target if tokens > 1] if fixed is None else [fixed]
    alternating = record.contestant.kind in ("alternation", "colocated")  # these run with all threads
    verify_s = times.plain if alternating else times.target
    limits = max((_limits(γ, agreements, times, verify_s) for γ in choices), key=lambda limits: limits.hidden)
    speed_up, activity = _ratio(record, plain), record.activity
    target, drafter = activity.target, activity.drafter
    return Speculation(
        record.contestant.name,
        limits,
        agreement=mean(float(agrees) for agreement in agreements for agrees in agreement),
        hidden_limit=limits.hidden,
        alternating_limit=limits.alternating,
        speed_up=speed_up,
        of_limit=speed_up / limits.hidden,
        acceptance_rate=activity.statistics.acceptance_rate,
        hit_rate=activity.statistics.hit_rate,
        acceptance_length=activity.statistics.acceptance_length,
        verify_step_s=target.step_s / max(target.steps, 1),
        draft_step_s=drafter.step_s / max(drafter.steps, 1),
        waited_share=target.waited_s / (target.waited_s + target.step_s + target.prefill_s + target.drafted_s),
    )


def median_times(times: Sequence[Times]) -> Times:
    """Return the medians of repeated measurements."""
    return Times(
        plain=_median_sweep([sample.plain for sample in times]),
        target=_median_sweep([sample.target for sample in times]),
        draft_step_s=median(sample.draft_step_s for sample in times),
    )


def find_doubts(measured: Sequence[Mapping[str, Times]], plain: LoopTimes) -> list[str]:
    """Return reasons why the times are unreliable. plain: the loop times of plain decoding's target.

    An isolated step and a step of plain decoding do the same work. If their times differ much, something else used the
    machine during one of them.
    """
    ran_s, doubts = plain.step_s / plain.steps, []
    for group in measured[0]:
        alone_s = [by_group[group].plain[1] for by_group in measured]
        if not 1 / _DOUBTFUL < median(alone_s) / ran_s < _DOUBTFUL:
            doubts.append(f"{group}: t_1 is {median(alone_s) * 1e3:.1f} ms alone, but {ran_s * 1e3:.1f} ms as it ran")
        if max(alone_s) > _DOUBTFUL * min(alone_s):
            doubts.append(f"{group}: t_1 went from {min(alone_s) * 1e3:.1f} to {max(alone_s) * 1e3:.1f} ms")
    return doubts


def _median_sweep(sweeps: Sequence[Sweep]) -> Sweep:
    return {tokens: median(sweep[tokens] for sweep in sweeps) for tokens in sweeps[0]}


def _limits(draft_length: int, agreements: Sequence[Tensor], times: Times, verify_s: Sweep) -> SpeculationLimits:
    return SpeculationLimits(
        draft_length,
        plain_step_s=times.plain[1],
        verify_step_s=verify_s[draft_length + 1],
        draft_step_s=times.draft_step_s,
        tokens_per_step=tokens_per_step([accepted_lengths(agrees) for agrees in agreements], draft_length),
    )


def _ratio(record: Record, reference: Record) -> float:
    """Return the median ratio over the repetitions: a long disturbance of the machine slows down both contestants."""
    return median(a / b for a, b in zip(record.tokens_per_s, reference.tokens_per_s, strict=True))
