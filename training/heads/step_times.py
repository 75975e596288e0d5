"""Times the steps of heads and their target. Must not know how the heads were trained."""

from pathlib import Path

from actors.replica.replica import load_with_heads
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import HeadsKind, HeadsSpec
from engine.loading.checkpoint import ModelSpec
from evaluation.step_times import time_heads, time_steps
from training.distillation.rates import LONGEST_DRAFT
from training.distillation.report import StepTimes
from training.distillation.text_stage import TargetOptions

_LENGTH = 256  # tokens of the cache while steps are timed


def measure_heads(target: TargetOptions, folder: Path, kind: HeadsKind) -> StepTimes:
    """Time the target's steps, and the heads' part of them for each token of the longest draft.

    Raises:
        ConfigError: the target or the heads can't be loaded.
    """
    spec = ModelSpec(
        name="target", path=target.path, device=target.device, threads=target.threads, slots=1, max_length=_LENGTH
    )
    widths = range(1, LONGEST_DRAFT + 2)
    heads_spec = HeadsSpec(name="heads", path=str(folder), kind=kind, min_acceptance=0.0)
    runner, _, heads = load_with_heads(spec, heads_spec)
    times = time_steps(runner, [(1, width) for width in widths], SamplingParams(max_tokens=1)).seconds
    length = min(LONGEST_DRAFT, heads.length)
    call_s, token_s = time_heads(heads, runner, 1, length)
    return StepTimes([times[1, width] for width in widths], token_s + call_s / length)
