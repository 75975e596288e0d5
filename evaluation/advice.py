"""Advice from a profile: the best draft length, its speed-up, and what limits it, as tables, words and JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from evaluation.profiling import STREAMS, Profile
from evaluation.speculation import SpeculationLimits

NOISY = 0.15  # spread of the times above which they say little
WORTHWHILE = 1.05  # speculation pays if the best speed-up is at least this


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What would help most if it were ideal."""

    name: str
    complaint: str
    detail: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The best draft length for a number of streams, and what limits the speed-up most."""

    streams: int
    best: SpeculationLimits  # with drafting hidden behind the target's steps
    obstacle: Obstacle

    @property
    def pays(self) -> bool:
        return self.best.hidden >= WORTHWHILE

    @property
    def sentence(self) -> str:
        best, obstacle = self.best, self.obstacle
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        if not self.pays:
            return (
                f"{streams}: speculation will not pay ({best.hidden:.2f} times as fast at best): "
                f"{obstacle.complaint}; {obstacle.detail}"
            )
        turns = f" ({best.alternating:.2f} if the models take turns)" if best.draft_step_s else ""
        return (
            f"{streams}: draft length {best.draft_length}, up to {best.hidden:.2f} times as fast{turns}. It is "
            f"limited most by {obstacle.name}: {obstacle.detail}"
        )


def advise(profile: Profile) -> list[Advice]:
    """Return the advice for each number of streams."""
    advice = []
    for streams in STREAMS:
        candidates = _all_limits(profile, streams)
        best = max(candidates, key=lambda limits: limits.hidden)
        advice.append(Advice(streams, best, _obstacle(candidates, best, profile.acceptance)))
    return advice


def as_json(profile: Profile) -> dict[str, Any]:
    """Return the measurements and the advice as JSON."""
    return {
        "target": profile.target,
        "drafter": profile.drafter,
        "proposer": profile.proposer,
        "temperature": profile.temperature,
        "acceptance": profile.acceptance,
        "spread": profile.spread,
        "noisy": profile.spread > NOISY,
        "bytes_per_token": {
            role: {"weights": size.step_bytes, "each_token_before": size.kv_bytes}
            for role, size in profile.sizes.items()
        },
        "answer_tokens": sum(map(len, profile.accepted)),
        "target_steps": [
            {"streams": streams, "tokens_per_stream": width, "seconds": seconds}
            for (streams, width), seconds in profile.target_step_s.items()
        ],
        "draft_steps": [{"streams": streams, "seconds": seconds} for streams, seconds in profile.draft_step_s.items()],
        "speed_ups": [_limits_json(streams, limits) for streams in STREAMS for limits in _all_limits(profile, streams)],
        "advice": [
            {
                "streams": advice.streams,
                "pays": advice.pays,
                "obstacle": advice.obstacle.name,
                **_limits_json(advice.streams, advice.best),
            }
            for advice in advise(profile)
        ],
    }


def show(console: Console, profile: Profile) -> None:
    """Print the tables of a profile, and the advice."""
    tokens = sum(map(len, profile.accepted))
    kind, has = (f"{profile.proposer} heads", "have") if profile.is_in_step else ("drafter", "has")
    console.print(
        f"\n{profile.target} with the {kind} {profile.drafter}, temperature {profile.temperature:g}: over {tokens} "
        f"tokens of the target's own answers, the {kind} {has} the same token {profile.acceptance:.0%} of the time.",
        soft_wrap=True,
    )
    for role, size in profile.sizes.items():
        if size.bytes_per_token is not None:
            console.print(f"{role}: {size.bytes_per_token}", soft_wrap=True)
    console.print(_time_table(profile))
    console.print(_speed_up_table(profile))
    if profile.spread > NOISY:
        console.print(
            f"[yellow]![/] The machine is noisy: repeated steps differ by {profile.spread:.0%}. Something else may be "
            "running; don't trust differences below that.",
            soft_wrap=True,
        )
    for advice in advise(profile):
        mark = "[green]✓[/]" if advice.pays else "[yellow]✗[/]"
        console.print(f"{mark} {advice.sentence}", soft_wrap=True)


def _limits_json(streams: int, limits: SpeculationLimits) -> dict[str, Any]:
    return {"streams": streams, **asdict(limits), "hidden": limits.hidden, "alternating": limits.alternating}


def _all_limits(profile: Profile, streams: int) -> list[SpeculationLimits]:
    return [profile.limits(streams, draft_length) for draft_length in profile.draft_lengths]


def _obstacle(candidates: Sequence[SpeculationLimits], best: SpeculationLimits, acceptance: float) -> Obstacle:
    """Return the obstacle (acceptance, drafter speed or cost of more tokens) whose removal would raise S* most."""
    cost = best.draft_step_s / best.plain_step_s
    growth = best.verify_step_s / best.plain_step_s
    low = Obstacle(
        "the acceptance",
        "the acceptance is too low",
        f"the drafter has the target's token {acceptance:.0%} of the time",
    )
    slow = Obstacle(
        "the drafter's speed", "the drafter is too slow", f"a draft token takes {cost:.2f} of a step of the target"
    )
    grows = Obstacle(
        "what more tokens cost",
        "the cost of a step grows with its tokens, as the target is bound by compute",
        f"{best.draft_length + 1} tokens of each stream take {growth:.2f} times as long as one",
    )
    ideal = {
        low: max(replace(limits, tokens_per_step=limits.draft_length + 1.0).hidden for limits in candidates),
        slow: max(replace(limits, draft_step_s=0.0).hidden for limits in candidates),
        grows: max(replace(limits, verify_step_s=limits.plain_step_s).hidden for limits in candidates),
    }
    return max(ideal, key=lambda obstacle: ideal[obstacle])


def _time_table(profile: Profile) -> Table:
    widths = sorted({width for _, width in profile.target_step_s})
    title = "ms per draft token, and per step of the target by tokens per stream"
    table = Table("streams", "drafts", *map(str, widths), box=SIMPLE, title=title)
    for streams, draft_step_s in profile.draft_step_s.items():
        steps = (profile.target_step_s[streams, width] for width in widths)
        table.add_row(str(streams), *(f"{seconds * 1e3:.1f}" for seconds in (draft_step_s, *steps)))
    return table


def _speed_up_table(profile: Profile) -> Table:
    title = "speed-up at best" if profile.is_in_step else "speed-up at best: drafting hidden (alternating)"
    table = Table("draft length", "tokens/step", box=SIMPLE, title=title)
    for streams in profile.draft_step_s:
        table.add_column(f"{streams} stream{'s' if streams > 1 else ''}", justify="right")
    for draft_length in profile.draft_lengths:
        columns = [profile.limits(streams, draft_length) for streams in profile.draft_step_s]
        speed_ups = (
            f"{limits.hidden:.2f}" + ("" if profile.is_in_step else f" ({limits.alternating:.2f})")
            for limits in columns
        )
        table.add_row(str(draft_length), f"{columns[0].tokens_per_step:.2f}", *speed_ups)
    return table
