"""Advice from a profile: the best draft length, its speed-up, and what limits it. Pure arithmetic and text."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cli.commands.profiling import STREAMS, Profile
from evaluation.limits import SpeculationLimits

NOISY = 0.15  # spread of the times above which they say little
WORTHWHILE = 1.05  # speculation pays if the best speed-up is at least this


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The factor that would help most if it were ideal."""

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
        """The advice as a sentence."""
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
            f"limited most by {obstacle.name}: "
            f"{obstacle.detail}"
        )


def advise(profile: Profile) -> list[Advice]:
    """Return the advice for each number of streams."""
    return [_advise(profile, streams) for streams in STREAMS]


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


def _limits_json(streams: int, limits: SpeculationLimits) -> dict[str, Any]:
    return {"streams": streams, **asdict(limits), "hidden": limits.hidden, "alternating": limits.alternating}


def _all_limits(profile: Profile, streams: int) -> list[SpeculationLimits]:
    return [profile.limits(streams, draft_length) for draft_length in profile.draft_lengths]


def _advise(profile: Profile, streams: int) -> Advice:
    candidates = _all_limits(profile, streams)
    best = max(candidates, key=lambda limits: limits.hidden)
    return Advice(streams, best, _obstacle(candidates, best, profile.acceptance))


def _obstacle(candidates: Sequence[SpeculationLimits], best: SpeculationLimits, acceptance: float) -> Obstacle:
    """Return the obstacle (acceptance, drafter speed or cost of more tokens) whose removal would raise S* most."""
    cost = best.draft_step_s / best.plain_step_s
    growth = best.verify_step_s / best.plain_step_s
    ideal = {
        Obstacle(
            "the acceptance",
            "the acceptance is too low",
            f"the drafter has the target's token {acceptance:.0%} of the time",
        ): [replace(limits, tokens_per_step=limits.draft_length + 1.0) for limits in candidates],
        Obstacle(
            "the drafter's speed",
            "the drafter is too slow",
            f"a draft token takes {cost:.2f} of a step of the target",
        ): [replace(limits, draft_step_s=0.0) for limits in candidates],
        Obstacle(
            "what more tokens cost",
            "the cost of a step grows with its tokens, as the target is bound by compute",
            f"{best.draft_length + 1} tokens of each stream take {growth:.2f} times as long as one",
        ): [replace(limits, verify_step_s=limits.plain_step_s) for limits in candidates],
    }
    return max(ideal, key=lambda obstacle: max(limits.hidden for limits in ideal[obstacle]))
