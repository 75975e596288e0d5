"""What a comparison found: speeds and ratios, sameness of texts, and the speed-up by speculation beside its limit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from torch import Tensor

from actors.loops.thread import LoopTimes
from benchmarks.peers.contestant import Activity, Contestant, Kind, Record, Text, Workload, interleave
from benchmarks.peers.huggingface import HuggingFace
from benchmarks.peers.replica import Sweep, Times
from benchmarks.processes import Host
from benchmarks.report import ratios
from evaluation.metrics import table
from evaluation.speculation import SpeculationLimits, accepted_lengths, tokens_per_step

# To which contestants are compared, and their columns' titles. Of several of a kind, the fastest.
_REFERENCES: dict[Kind, str] = {
    "hf": "× HF",
    "vllm": "× vLLM",
    "hf-assisted": "× best assisted",
    "plain": "× our plain",
}
_DRAFTING: tuple[Kind, ...] = ("alternation", "fixed", "adaptive", "colocated")
_DOUBTFUL = 1.5  # ratio of two times of the same step above which they are unreliable


@dataclass(frozen=True, slots=True)
class Sameness:
    """How alike two contestants' texts are. Tokens after the first difference of two texts are not compared."""

    texts: int
    different: int  # texts that differ somewhere
    share: float  # share of all tokens that come before a first difference
    largest_gap: float  # largest difference of the target's scores at a first difference; 0 if all texts are equal


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Findings of one workload."""

    temperature: float
    streams: int
    scores: Sequence[Score]
    speculations: Sequence[Speculation]
    times: Mapping[str, Times]  # by group of contestants: medians over the repetitions
    doubts: Sequence[str]  # reasons why times, and limits computed from them, are unreliable

    @property
    def title(self) -> str:
        return f"{self.streams} stream(s), temperature {self.temperature:g}"


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
        models: judge texts and agreement.
        measure: returns step times by group, before every repetition. Other groups are given those of the first group.
        repetitions, prompts, report, until_s: as in `interleave`.
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
        if record.contestant.kind in _DRAFTING:
            agreements = [models.call(HuggingFace.agreement, text) for text in record.texts]
            group_times = times.get(record.contestant.group, next(iter(times.values())))
            speculations.append(speculation(record, by_kind["plain"], agreements, group_times))
    models.pause()
    doubts = find_doubts(measured, by_kind["plain"].activity.target)
    return Comparison(workload.temperature, workload.streams, scores, speculations, times, doubts)


def score(records: Sequence[Record], sameness: Callable[[Record], Sameness | None]) -> list[Score]:
    """Return the score of every record."""
    references: dict[Kind, Record] = {}
    for kind in _REFERENCES:
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
            {
                kind: median(ratios(record.tokens_per_s, reference.tokens_per_s))
                for kind, reference in references.items()
            },
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
    speed_up = median(ratios(record.tokens_per_s, plain.tokens_per_s))
    statistics, target, drafter = record.activity.statistics, record.activity.target, record.activity.drafter
    return Speculation(
        record.contestant.name,
        limits,
        agreement=mean(float(agrees) for agreement in agreements for agrees in agreement),
        hidden_limit=limits.hidden,
        alternating_limit=limits.alternating,
        speed_up=speed_up,
        of_limit=speed_up / limits.hidden,
        acceptance_rate=statistics.acceptance_rate,
        hit_rate=statistics.hit_rate,
        acceptance_length=statistics.acceptance_length,
        verify_step_s=target.step_s / max(target.steps, 1),
        draft_step_s=drafter.step_s / max(drafter.steps, 1),
        waited_share=target.waited_s / (target.waited_s + target.step_s + target.prefill_s + target.drafted_s),
    )


def median_times(times: Sequence[Times]) -> Times:
    """Return the medians of repeated measurements."""

    def of(sweeps: Sequence[Sweep]) -> Sweep:
        return {tokens: median(sweep[tokens] for sweep in sweeps) for tokens in sweeps[0]}

    return Times(
        plain=of([sample.plain for sample in times]),
        target=of([sample.target for sample in times]),
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


def first_difference(answer: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index of the first token that differs; None if none does."""
    return next((i for i, (a, b) in enumerate(zip(answer, expected, strict=True)) if a != b), None)


def _limits(draft_length: int, agreements: Sequence[Tensor], times: Times, verify_s: Sweep) -> SpeculationLimits:
    return SpeculationLimits(
        draft_length,
        plain_step_s=times.plain[1],
        verify_step_s=verify_s[draft_length + 1],
        draft_step_s=times.draft_step_s,
        tokens_per_step=tokens_per_step([accepted_lengths(agrees) for agrees in agreements], draft_length),
    )


def _sameness(record: Record, hf: Record, plain: Record, models: Host[HuggingFace]) -> Sameness | None:
    """Compare greedy texts with `generate`, sampled ones with plain Consort: others draw other random numbers."""
    if record.texts[0].params.greedy:
        return _compare_texts(record.texts, hf.texts, models)
    if record.contestant.kind in ("hf", "hf-assisted", "vllm"):
        return None
    return _compare_texts(record.texts, plain.texts, models)


def _compare_texts(texts: Sequence[Text], reference: Sequence[Text], models: Host[HuggingFace]) -> Sameness:
    """Compare answers to the same prompts. The models' target judges ties."""
    same, gaps = 0, []
    for text, expected in zip(texts, reference, strict=True):
        index = first_difference(text.answer, expected.answer)
        same += len(expected.answer) if index is None else index
        if index is not None:
            until = expected.answer[: index + 1]
            gaps.append(abs(models.call(HuggingFace.gap, text.prompt, until, text.answer[index], text.params)))
    return Sameness(len(texts), len(gaps), same / sum(len(text.answer) for text in reference), max(gaps, default=0.0))


def as_text(comparison: Comparison) -> str:
    """Return the tables of one comparison."""
    parts = [
        comparison.title,
        _score_table(comparison.scores),
        _limit_table(comparison.speculations) if comparison.speculations else "",
        *(f"S and S* are unreliable: {doubt}" for doubt in comparison.doubts),
    ]
    for group, times in comparison.times.items():
        apart, plain = (
            ", ".join(f"{tokens}: {seconds * 1e3:.1f}" for tokens, seconds in sweep.items())
            for sweep in (times.target, times.plain)
        )
        parts.append(
            f"{group}: an isolated target step, in ms by tokens per row: {apart}; with the threads of plain decoding: "
            f"{plain}"
        )
    return "\n\n".join(filter(None, parts))


def _score_table(scores: Sequence[Score]) -> str:
    present = [kind for kind in _REFERENCES if kind in scores[0].ratios]
    head = ["contestant", "tokens/s", "min – max", *(_REFERENCES[kind] for kind in present)]
    rows = []
    for score in scores:
        least, most = min(score.tokens_per_s), max(score.tokens_per_s)
        row = [score.name, f"{score.median:.1f}", f"{least:.1f} – {most:.1f}"]
        row += [f"{score.ratios[kind]:.2f}" for kind in present]
        same = score.sameness
        row += ["", ""] if same is None else [f"{same.share:.1%}", f"{same.largest_gap:.2g}" if same.different else ""]
        rows.append(row)
    return table([*head, "same text", "largest gap"], rows)


def _limit_table(speculations: Sequence[Speculation]) -> str:
    head = ["drafting", "γ", "t_1", "t_verify", "t_draft", "α", "E", "S", "S*", "achieved", "of S*"]
    head += ["acc. rate", "hit rate", "tokens/step", "step", "draft", "waited"]
    rows = []
    for speculation in speculations:
        limits = speculation.limits
        row = [speculation.name, str(limits.draft_length)]
        row += map(_ms, (limits.plain_step_s, limits.verify_step_s, limits.draft_step_s))
        numbers = (
            speculation.agreement,
            limits.tokens_per_step,
            speculation.alternating_limit,
            speculation.hidden_limit,
            speculation.speed_up,
        )
        row += [*(f"{number:.2f}" for number in numbers), f"{speculation.of_limit:.0%}"]
        row += [
            f"{rate:.2f}" for rate in (speculation.acceptance_rate, speculation.hit_rate, speculation.acceptance_length)
        ]
        row += [*map(_ms, (speculation.verify_step_s, speculation.draft_step_s)), f"{speculation.waited_share:.0%}"]
        rows.append(row)
    return table(head, rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
