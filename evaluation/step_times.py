"""Seconds of a model's steps as a server takes them, sampling included. Must not know which model it is."""

import time
from collections.abc import Sequence
from statistics import median

from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample

_CONTEXT = 128  # tokens in the cache
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_TIMING_S = 12.0  # no round starts after that

Step = tuple[int, int]  # streams, tokens of each


def time_steps(runner: Runner, steps: Sequence[Step], params: SamplingParams) -> dict[Step, float]:
    """Seconds of each step, sampling included: the median of several rounds over all of them. Scribbles over slots."""
    times: dict[Step, list[float]] = {step: [] for step in steps}
    began_s = time.perf_counter()
    for done in range(1 + _MAX_ROUNDS):
        for step, seconds in times.items():
            seconds.append(_time_step(runner, *step, params))
        if done >= _MIN_ROUNDS and time.perf_counter() - began_s > _TIMING_S:
            break
    return {step: median(seconds[1:]) for step, seconds in times.items()}  # the first round warms up


def _time_step(runner: Runner, streams: int, width: int, params: SamplingParams) -> float:
    rows = [RowInput(slot, _CONTEXT, [0] * width) for slot in range(streams)]
    history = History(params, [0] * (_CONTEXT + 1), _CONTEXT)
    positions = [Position(history, [0] * j) for _ in rows for j in range(width)]
    began_s = time.perf_counter()
    logits = runner.logits(rows)[: len(positions)]
    sample(logits, SamplingBatch.build(positions, logits.shape[-1], logits.device)).tolist()
    return time.perf_counter() - began_s
