"""Formats the findings of a comparison as text tables."""

from collections.abc import Sequence
from dataclasses import fields

from benchmarks.comparison.findings import REFERENCES, Score, Speculation
from benchmarks.comparison.run import Comparison
from benchmarks.peers.contestant import Kind
from benchmarks.peers.replica import Times
from benchmarks.report import table

_TITLES: dict[Kind, str] = {"hf": "× HF", "vllm": "× vLLM", "hf-assisted": "× best assisted", "plain": "× our plain"}


def as_text(comparison: Comparison) -> str:
    """Return the tables of one comparison."""
    title = f"{comparison.streams} stream(s), temperature {comparison.temperature:g}"
    parts = [title, _score_table(comparison.scores), _limit_table(comparison.speculations)]
    parts.append(_time_table(comparison.scores))
    parts += [f"S and S* are unreliable: {doubt}" for doubt in comparison.doubts]
    parts += [_sweep_line(group, times) for group, times in comparison.times.items()]
    return "\n\n".join(part for part in parts if part)


def _sweep_line(group: str, times: Times) -> str:
    disaggregated, plain = (
        ", ".join(f"{tokens}: {seconds * 1e3:.1f}" for tokens, seconds in sweep.items())
        for sweep in (times.target, times.plain)
    )
    return (
        f"{group}: an isolated target step, in ms by tokens per row: {disaggregated}; "
        f"with the threads of plain decoding: {plain}"
    )


def _score_table(scores: Sequence[Score]) -> str:
    present = [kind for kind in REFERENCES if kind in scores[0].ratios]
    rows = [
        [
            score.name,
            f"{score.median:.1f}",
            f"{min(score.tokens_per_s):.1f} – {max(score.tokens_per_s):.1f}",
            *(f"{score.ratios[kind]:.2f}" for kind in present),
            *_sameness_cells(score),
        ]
        for score in scores
    ]
    head = ["contestant", "tokens/s", "min – max", *(_TITLES[kind] for kind in present), "same text", "largest gap"]
    return table(head, rows)


def _sameness_cells(score: Score) -> list[str]:
    if score.sameness is None:
        return ["", ""]
    gap = f"{score.sameness.largest_gap:.2g}" if score.sameness.different else ""
    return [f"{score.sameness.share:.1%}", gap]


def _limit_table(speculations: Sequence[Speculation]) -> str:
    head = ["drafting", "γ", "t_1", "t_verify", "t_draft", "α", "E", "S", "S*", "achieved", "of S*"]
    head += ["acc. rate", "hit rate", "tokens/step", "step", "draft", "waited"]
    rows = [
        [
            speculation.name,
            str(speculation.limits.draft_length),
            *map(
                _ms,
                (speculation.limits.plain_step_s, speculation.limits.verify_step_s, speculation.limits.draft_step_s),
            ),
            f"{speculation.agreement:.2f}",
            *(
                f"{value:.2f}"
                for value in (
                    speculation.limits.tokens_per_step,
                    speculation.alternating_limit,
                    speculation.hidden_limit,
                )
            ),
            f"{speculation.speed_up:.2f}",
            f"{speculation.of_limit:.0%}",
            f"{speculation.acceptance_rate:.2f}",
            f"{speculation.hit_rate:.2f}",
            f"{speculation.acceptance_length:.2f}",
            *map(_ms, (speculation.verify_step_s, speculation.draft_step_s)),
            f"{speculation.waited_share:.0%}",
        ]
        for speculation in speculations
    ]
    return table(head, rows)


def _time_table(scores: Sequence[Score]) -> str:
    """Format all times of the targets' loops, per step."""
    timed = [score for score in scores if score.activity.target.steps]
    names = (
        [
            field.name
            for field in fields(timed[0].activity.target)
            if field.name.endswith("_s") and field.name != "idle_s"
        ]
        if timed
        else []
    )
    rows = [
        [score.name, *(_ms(getattr(score.activity.target, name) / score.activity.target.steps) for name in names)]
        for score in timed
    ]
    return table(["target, per step", *(name.removesuffix("_s") for name in names)], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
