"""Times the steps of a drafter and its target. Must not know how the drafter was trained."""

from pathlib import Path

from actors.replica.replica import load_runner
from decoding.sampling.params import SamplingParams
from engine.loading.checkpoint import ModelSpec
from evaluation.step_times import time_steps
from training.distillation.rates import LONGEST_DRAFT
from training.distillation.report import StepTimes

_LENGTH = 256  # tokens of the cache while steps are timed


def measure_steps(target: str, drafter: Path, *, device: str, threads: int | None) -> StepTimes:
    """Time the steps of both models, one after the other.

    Raises:
        ConfigError: a model can't be loaded or served.
    """
    widths = range(1, LONGEST_DRAFT + 2)
    times = [
        time_steps(
            load_runner(ModelSpec(name=name, path=path, device=device, threads=threads, slots=1, max_length=_LENGTH)),
            [(1, width) for width in taken],
            SamplingParams(max_tokens=1),
        ).seconds
        for name, path, taken in (("target", target, widths), ("drafter", str(drafter), range(1, 2)))
    ]
    return StepTimes([times[0][1, width] for width in widths], times[1][1, 1])
