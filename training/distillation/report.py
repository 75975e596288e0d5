"""What a trained student is worth: acceptance before and after, step times, and the speed-up to expect of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decoding.sampling.params import SamplingParams
from engine.heads.proposer import HeadsKind, HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_runner, load_with_heads
from engine.model.runner import Runner
from evaluation.limits import SpeculationLimits
from evaluation.step_times import time_heads, time_steps
from training.distillation.rates import LONGEST_DRAFT, Rates
from training.texts import TargetOptions

_DRAFT_LENGTHS = range(1, LONGEST_DRAFT + 1)
_GAMMAS = [f"γ = {length}" for length in _DRAFT_LENGTHS]
_TIMED_LENGTH = 256  # tokens of the cache while steps are timed
_PARAMS = SamplingParams(max_tokens=1)
_KINDS = {"shared_noise": "shared noise", "rejection": "rejection"}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step of one stream on this machine, each model alone."""

    target_s: list[float]
    """of a target that reads 1, 2, … tokens; the first is plain decoding"""
    drafter_s: float
    """for one token of a draft"""


def time_drafter(target: TargetOptions, drafter: Path) -> StepTimes:
    """Time the steps of a target and of its drafter, one after the other.

    Raises:
        ConfigError: a model can't be loaded or served.
    """
    target_s = _target_steps(load_runner(_spec(target)))
    runner = load_runner(replace(_spec(target), name="drafter", path=str(drafter)))
    return StepTimes(target_s, time_steps(runner, [(1, 1)], _PARAMS).seconds[1, 1])


def time_heads_of(target: TargetOptions, folder: Path, kind: HeadsKind) -> StepTimes:
    """Time the target's steps, and the heads' part of them for each token of the longest draft.

    Raises:
        ConfigError: the target or the heads can't be loaded.
    """
    heads_spec = HeadsSpec(name="heads", path=str(folder), kind=kind, min_acceptance=0.0)
    runner, _, heads = load_with_heads(_spec(target), heads_spec)
    target_s = _target_steps(runner)
    length = min(LONGEST_DRAFT, heads.length)
    call_s, token_s = time_heads(heads, runner, 1, length)
    return StepTimes(target_s, token_s + call_s / length)


def _target_steps(runner: Runner) -> list[float]:
    """Return the seconds of steps of 1, 2, … tokens."""
    steps = [(1, width) for width in range(1, LONGEST_DRAFT + 2)]
    times = time_steps(runner, steps, _PARAMS).seconds
    return [times[step] for step in steps]


def _spec(target: TargetOptions) -> ModelSpec:
    return replace(target.spec(), slots=1, max_length=_TIMED_LENGTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudentReport:
    """What was made of what, and what it is worth."""

    made: str
    """such as "Drafter" """
    command: str
    target: str
    start: str
    parameters: int
    settings: Mapping[str, object]
    texts: int
    tokens: int
    held_out_texts: int
    before: Sequence[Rates]
    after: Sequence[Rates]
    steps: StepTimes

    def speed_ups(self, rates: Rates, kind: str) -> list[SpeculationLimits]:
        """Return the limits of the speed-up for drafts of 1, 2, … tokens."""
        times = self.steps
        return [
            SpeculationLimits(length, times.target_s[0], times.target_s[length], times.drafter_s, tokens)
            for length, tokens in enumerate(rates.lengths[kind], start=1)
        ]

    def write(self, folder: Path) -> None:
        """Write report.json and report.md."""
        (folder / "report.json").write_text(json.dumps(self._document(), indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(self._text(), encoding="utf-8")

    def _document(self) -> dict[str, object]:
        speed_up = [
            {
                "temperature": rates.temperature,
                "verification": kind,
                "alternating": [limits.alternating for limits in self.speed_ups(rates, kind)],
                "hidden": [limits.hidden for limits in self.speed_ups(rates, kind)],
            }
            for rates in self.after
            for kind in _KINDS
        ]
        measured = {
            name: [asdict(rates) | {"lengths": rates.lengths} for rates in each]
            for name, each in (("before", self.before), ("after", self.after))
        }
        return asdict(self) | measured | {"speed_up": speed_up}

    def _text(self) -> str:
        intro = (
            f"# {self.made} for {self.target}\n\n"
            f"Made by `{self.command}` from {self.start}: {self.parameters:,} parameters, trained on\n"
            f"{self.texts:,} texts of the target ({self.tokens:,} tokens), measured on {self.held_out_texts} others.\n"
        )
        return "\n".join([intro, self._acceptance(), self._speed()])

    def _acceptance(self) -> str:
        measured = [("before", rates) for rates in self.before] + [("after", rates) for rates in self.after]
        lengths = [
            [rates.temperature, name, when, f"{rates.agreement:.3f}", *_numbers(rates.lengths[kind])]
            for kind, name in _KINDS.items()
            for when, rates in measured
        ]
        positions = [
            [rates.temperature, name, *_numbers(getattr(rates, kind), 3)]
            for kind, name in _KINDS.items()
            for rates in self.after
        ]
        return (
            "## Acceptance\nTokens that a step of the target commits, its own included, for drafts of γ tokens.\n\n"
            + _table(["temperature", "verification", "training", "agreement", *_GAMMAS], lengths)
            + "\nProbability that at least so many tokens of a draft are accepted, after training:\n\n"
            + _table(["temperature", "verification", *_DRAFT_LENGTHS], positions)
        )

    def _speed(self) -> str:
        plain_s, *verify_s = self.steps.target_s
        speed_ups = [
            [rates.temperature, name, *_numbers([limits.alternating for limits in self.speed_ups(rates, kind)])]
            for kind, name in _KINDS.items()
            for rates in self.after
        ]
        return (
            f"## Speed\nOne stream on this machine: a draft token takes {1e3 * self.steps.drafter_s:.2f} ms and "
            f"a token of the target {1e3 * plain_s:.2f} ms.\nTo verify γ tokens takes the target, in ms:\n\n"
            + _table([*_GAMMAS], [_numbers([1e3 * seconds for seconds in verify_s])])
            + "\nSo the most to expect over plain decoding, both on one device, is:\n\n"
            + _table(["temperature", "verification", *_GAMMAS], speed_ups)
        )


def _numbers(values: Sequence[float], digits: int = 2) -> list[str]:
    return [f"{value:.{digits}f}" for value in values]


def _table(header: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in (header, ["---"] * len(header), *rows))
