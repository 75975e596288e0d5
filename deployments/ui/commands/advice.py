"""What a profile means: which draft length, how much faster, and what stands in the way. Pure arithmetic and words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from deployments.ui.commands.profiling import STREAMS, Profile
from evaluation.limits import SpeculationLimits

WORTHWHILE = 1.05  # a speed-up below this, at best, is none


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What would help most if it were ideal."""

    name: str
    complaint: str
    detail: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The best draft length for so many streams at once, and what limits it most."""

    streams: int
    best: SpeculationLimits  # with drafting hidden behind the target's steps
    obstacle: Obstacle

    @property
    def pays(self) -> bool:
        return self.best.hidden >= WORTHWHILE

    @property
    def sentence(self) -> str:
        """For people."""
        best, obstacle = self.best, self.obstacle
        streams = "1 stream" if self.streams == 1 else f"{self.streams} streams"
        if not self.pays:
            return (
                f"{streams}: speculation will not pay ({best.hidden:.2f} times as fast at best): "
                f"{obstacle.complaint}; {obstacle.detail}"
            )
        return (
            f"{streams}: draft length {best.draft_length}, up to {best.hidden:.2f} times as fast "
            f"({best.alternating:.2f} if the models take turns). It is limited most by {obstacle.name}: "
            f"{obstacle.detail}"
        )


def advise(profile: Profile) -> list[Advice]:
    """For each number of streams."""
    return [_advise(profile, streams) for streams in STREAMS]


def as_json(profile: Profile) -> dict[str, Any]:
    """Everything that was measured and that follows."""
    return {
        "target": profile.target,
        "drafter": profile.drafter,
        "temperature": profile.temperature,
        "acceptance": profile.acceptance,
        "answer_tokens": sum(map(len, profile.agreements)),
        "target_steps": [
            {"streams": streams, "tokens_per_stream": width, "seconds": seconds}
            for (streams, width), seconds in profile.target_step_s.items()
        ],
        "draft_steps": [{"streams": streams, "seconds": seconds} for streams, seconds in profile.draft_step_s.items()],
        "speed_ups": [_limits_json(streams, one) for streams in STREAMS for one in _all_limits(profile, streams)],
        "advice": [
            {
                "streams": one.streams,
                "pays": one.pays,
                "obstacle": one.obstacle.name,
                **_limits_json(one.streams, one.best),
            }
            for one in advise(profile)
        ],
    }


def _limits_json(streams: int, limits: SpeculationLimits) -> dict[str, Any]:
    return {"streams": streams, **asdict(limits), "hidden": limits.hidden, "alternating": limits.alternating}


def _all_limits(profile: Profile, streams: int) -> list[SpeculationLimits]:
    return [profile.limits(streams, draft_length) for draft_length in profile.draft_lengths]


def _advise(profile: Profile, streams: int) -> Advice:
    every = _all_limits(profile, streams)
    best = max(every, key=lambda one: one.hidden)
    return Advice(streams, best, _obstacle(every, best, profile.acceptance))


def _obstacle(every: Sequence[SpeculationLimits], best: SpeculationLimits, acceptance: float) -> Obstacle:
    """The one of acceptance, the drafter's speed and the cost of more tokens without which S* would be highest."""
    cost = best.draft_step_s / best.plain_step_s
    growth = best.verify_step_s / best.plain_step_s
    ideal = {
        Obstacle(
            "the acceptance",
            "the acceptance is too low",
            f"the drafter has the target's token {acceptance:.0%} of the time",
        ): [replace(one, tokens_per_step=one.draft_length + 1.0) for one in every],
        Obstacle(
            "the drafter's speed",
            "the drafter is too slow",
            f"a draft token takes {cost:.2f} of a step of the target",
        ): [replace(one, draft_step_s=0.0) for one in every],
        Obstacle(
            "what more tokens cost",
            "the cost of a step grows with its tokens, as the target is bound by compute",
            f"{best.draft_length + 1} tokens of each stream take {growth:.2f} times as long as one",
        ): [replace(one, verify_step_s=one.plain_step_s) for one in every],
    }
    return max(ideal, key=lambda obstacle: max(one.hidden for one in ideal[obstacle]))
