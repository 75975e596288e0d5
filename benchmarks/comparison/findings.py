"""What follows from the records of a comparison: scores, ratios, and how close speculation came to its limit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from torch import Tensor

from actors.loops.thread import LoopTimes
from benchmarks.comparison.interleave import Record
from benchmarks.comparison.sameness import Sameness
from benchmarks.peers.contestant import Activity, Kind
from benchmarks.peers.replica import Sweep, Times
from evaluation.limits import SpeculationLimits, tokens_per_step

REFERENCES: tuple[Kind, ...] = ("hf", "vllm", "hf-assisted", "plain")  # of several, the one with the highest median
_DOUBTFUL = 1.5  # how far two times of the same thing may be apart


@dataclass(frozen=True, slots=True)
class Score:
    """One contestant in one workload."""

    name: str
    group: str
    kind: Kind
    draft_length: int | None  # γ, where it is constant
    tokens_per_s: Sequence[float]  # one per repetition
    median: float
    ratios: dict[Kind, float]  # to each reference that took part: the median over the repetitions
    sameness: Sameness | None  # None: there is nothing to compare with, as others draw other random numbers
    activity: Activity


@dataclass(frozen=True, slots=True)
class Speculation:
    """How far a contestant that drafts came. An adaptive one is held against the best γ of all that it may choose."""

    name: str
    limits: SpeculationLimits
    agreement: float  # α: how often the drafter, given the text before, has the target's token
    hidden_limit: float  # S*
    alternating_limit: float  # S, without transport
    speed_up: float  # achieved, over our own plain decoding
    of_limit: float  # achieved / S*
    acceptance_rate: float  # accepted / drafted
    hit_rate: float  # how often, after a rejection, a draft of what followed was there already
    acceptance_length: float  # tokens committed per target step
    verify_step_s: float  # mean of the target's steps as they ran, with everything beside them
    draft_step_s: float  # mean of the drafter's
    waited_share: float  # of the target's time with requests: waiting for drafts


def score(records: Sequence[Record], sameness: Callable[[Record], Sameness | None]) -> list[Score]:
    """The score of every record."""
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
    """Achieved against possible, of a contestant that drafts.

    agreements: [N] bool each, of the texts of this record.
    """
    fixed = record.contestant.draft_length
    choices = [tokens - 1 for tokens in times.target if tokens > 1] if fixed is None else [fixed]
    alternating = record.contestant.kind in ("alternation", "inside")  # with all threads
    verify_s = times.plain if alternating else times.target
    limits = max((_limits(γ, agreements, times, verify_s) for γ in choices), key=lambda each: each.hidden)
    speed_up, activity = _ratio(record, plain), record.activity
    target, drafter = activity.target, activity.drafter
    return Speculation(
        record.contestant.name,
        limits,
        agreement=mean(float(place) for agreed in agreements for place in agreed),
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


def typical(times: Sequence[Times]) -> Times:
    """The medians of times that were taken at different moments."""
    return Times(
        plain=_typical_sweep([each.plain for each in times]),
        target=_typical_sweep([each.target for each in times]),
        draft_step_s=median(each.draft_step_s for each in times),
    )


def find_doubts(measured: Sequence[Mapping[str, Times]], plain: LoopTimes) -> list[str]:
    """What speaks against the times. plain: of plain decoding's target, as it ran.

    A step alone and a step of plain decoding as it ran are the same thing but for the loop around it. Where they differ
    much, something else had the machine at one of both moments.
    """
    ran_s, doubts = plain.step_s / plain.steps, []
    for group in measured[0]:
        alone_s = [each[group].plain[1] for each in measured]
        if not 1 / _DOUBTFUL < median(alone_s) / ran_s < _DOUBTFUL:
            doubts.append(f"{group}: t_1 is {median(alone_s) * 1e3:.1f} ms alone, but {ran_s * 1e3:.1f} ms as it ran")
        if max(alone_s) > _DOUBTFUL * min(alone_s):
            doubts.append(f"{group}: t_1 went from {min(alone_s) * 1e3:.1f} to {max(alone_s) * 1e3:.1f} ms")
    return doubts


def _typical_sweep(sweeps: Sequence[Sweep]) -> Sweep:
    return {tokens: median(sweep[tokens] for sweep in sweeps) for tokens in sweeps[0]}


def _limits(draft_length: int, agreements: Sequence[Tensor], times: Times, verify_s: Sweep) -> SpeculationLimits:
    return SpeculationLimits(
        draft_length,
        plain_step_s=times.plain[1],
        verify_step_s=verify_s[draft_length + 1],
        draft_step_s=times.draft_step_s,
        tokens_per_step=tokens_per_step(agreements, draft_length),
    )


def _ratio(record: Record, reference: Record) -> float:
    """The median over the repetitions: what disturbs the machine for longer than a turn disturbs both."""
    return median(a / b for a, b in zip(record.tokens_per_s, reference.tokens_per_s, strict=True))
