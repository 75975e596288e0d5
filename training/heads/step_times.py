"""Times the steps of heads and their target. Must not know how the heads were trained."""

import time
from pathlib import Path
from statistics import median

from actors.heads.proposer import HeadProposer, Reading
from actors.heads.sampling import DraftStart
from actors.heads.spec import HeadsKind, HeadsSpec
from actors.loading.checkpoint import ModelSpec
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.replica.replica import load_with_heads
from decoding.sampling.params import SamplingParams
from evaluation.step_times import time_steps
from training.distillation.rates import LONGEST_DRAFT
from training.distillation.report import StepTimes
from training.distillation.text_stage import TargetOptions

_LENGTH = 256  # tokens of the cache while steps are timed
_CONTEXT = 128  # tokens in the cache
_ROUNDS = 10
_RANKS = 4


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
    return StepTimes([times[1, width] for width in widths], _time_heads(heads, runner))


def _time_heads(heads: HeadProposer, runner: Runner) -> float:
    """Return the seconds for each token of a draft, what is read before it included."""
    length = min(LONGEST_DRAFT, heads.length)
    params = SamplingParams(max_tokens=1)
    seconds: list[float] = []
    for number in range(1 + _ROUNDS):
        start = _CONTEXT + number
        runner.logits([RowInput(0, start, [0, 0])])
        assert runner.hidden is not None
        began_s = time.perf_counter()
        heads.read([Reading(0, start, [0, 0], [0, 1], 1)], runner.hidden)
        heads.propose([DraftStart(0, start + 2, params)], length, _RANKS)
        seconds.append((time.perf_counter() - began_s) / length)
    return median(seconds[1:])
