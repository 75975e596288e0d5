"""The findings of a comparison as tables to read."""

from collections.abc import Sequence
from dataclasses import fields

from benchmarks.comparison.comparison import Comparison
from benchmarks.comparison.findings import REFERENCES, Score, Speculation
from benchmarks.peers.contestant import Kind
from benchmarks.peers.replica import Times
from benchmarks.report import table

_TITLES: dict[Kind, str] = {"hf": "× HF", "vllm": "× vLLM", "hf-assisted": "× best assisted", "plain": "× our plain"}


def as_text(comparison: Comparison) -> str:
    """The tables of one comparison."""
    title = f"{comparison.streams} stream(s), temperature {comparison.temperature:g}"
    parts = [title, _score_table(comparison.scores), _limit_table(comparison.speculations)]
    parts.append(_time_table(comparison.scores))
    parts += [f"NOT TO BE BELIEVED, S and S*: {doubt}" for doubt in comparison.doubts]
    parts += [_sweep_line(group, times) for group, times in comparison.times.items()]
    return "\n\n".join(part for part in parts if part)


def _sweep_line(group: str, times: Times) -> str:
    beside, alone = (
        ", ".join(f"{tokens}: {seconds * 1e3:.1f}" for tokens, seconds in sweep.items())
        for sweep in (times.target, times.plain)
    )
    return (
        f"{group}: a target step alone, in ms by tokens per row: {beside}; with the threads of plain decoding: {alone}"
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


def _limit_table(found: Sequence[Speculation]) -> str:
    head = ["drafting", "γ", "t_1", "t_verify", "t_draft", "α", "E", "S", "S*", "achieved", "of S*"]
    head += ["acc. rate", "hit rate", "tokens/step", "step", "draft", "waited"]
    rows = [
        [
            each.name,
            str(each.limits.draft_length),
            *map(_ms, (each.limits.plain_step_s, each.limits.verify_step_s, each.limits.draft_step_s)),
            f"{each.agreement:.2f}",
            *(f"{value:.2f}" for value in (each.limits.tokens_per_step, each.alternating_limit, each.hidden_limit)),
            f"{each.speed_up:.2f}",
            f"{each.of_limit:.0%}",
            f"{each.acceptance_rate:.2f}",
            f"{each.hit_rate:.2f}",
            f"{each.acceptance_length:.2f}",
            *map(_ms, (each.verify_step_s, each.draft_step_s)),
            f"{each.waited_share:.0%}",
        ]
        for each in found
    ]
    return table(head, rows)


def _time_table(scores: Sequence[Score]) -> str:
    """Every time that a target's loop keeps, per step."""
    timed = [score for score in scores if score.activity.target.steps]
    names = (
        [each.name for each in fields(timed[0].activity.target) if each.name.endswith("_s") and each.name != "idle_s"]
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
