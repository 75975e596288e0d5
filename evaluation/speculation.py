"""What speculation can give here: seconds of steps as a server takes them, and bounds of the speed-up from these."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

import torch
from torch import Tensor

from decoding.drafts.choices import RANKS
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.heads.proposer import DraftStart, HeadProposer, Reading
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_CONTEXT = 128  # tokens in the cache, where layers carry no state
_MIN_ROUNDS, _MAX_ROUNDS = 3, 15
_TIMING_S = 12.0  # no round starts after that
_HEADS_ROUNDS = 10

Step = tuple[int, int]  # streams, tokens of each


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Seconds per step and tokens per target step of one run at draft length γ."""

    draft_length: int
    plain_step_s: float  # t_1
    verify_step_s: float  # t_verify
    draft_step_s: float  # t_draft, one draft token
    tokens_per_step: float  # E, given that the target always has a full draft

    @property
    def hidden(self) -> float:
        """S*: the speed-up over plain decoding with drafting and transport fully hidden.

        At most E, as long as verification takes no less time than a plain step.
        """
        slowest_s = max(self.verify_step_s, self.draft_length * self.draft_step_s)
        return self.tokens_per_step * self.plain_step_s / slowest_s

    @property
    def alternating(self) -> float:
        """S: the speed-up of alternating drafting and verification, without transport."""
        return self.tokens_per_step * self.plain_step_s / (self.draft_length * self.draft_step_s + self.verify_step_s)


def agreement(drafter_logits: Tensor, history: History, answer: Sequence[int]) -> Tensor:
    """Return for each token of the target's answer, [N], whether the drafter samples the same, [N] bool.

    An accepted draft equals the answer, so one pass over the answer covers every draft that would be accepted.

    drafter_logits: [N, V], after the text before each token of the answer. history: the text before the answer.
    """
    positions = [Position(history, answer[:i]) for i in range(len(answer))]
    drafted = sample(drafter_logits, SamplingBatch.build(positions, drafter_logits.shape[-1], drafter_logits.device))
    return drafted.cpu() == torch.tensor(answer)


def accepted_lengths(agrees: Tensor) -> Tensor:
    """Return how many tokens of a draft would be accepted from each token on, [N] int64.

    agrees: [N] bool, or 0 and 1: whether the drafter samples the target's token.
    """
    lengths, length = [], 0
    for agreed in reversed(agrees.bool().tolist()):
        length = (length + 1) * agreed
        lengths.append(length)
    return torch.tensor(lengths[::-1], dtype=torch.int64)


def tokens_per_step(accepted: Sequence[Tensor], draft_length: int) -> float:
    """Return E, the mean of accepted + 1 if each target step verifies `draft_length` draft tokens.

    accepted: of each answer, as `accepted_lengths` returns it. draft_length: γ, shorter than the longest answer.
    """
    tokens = steps = 0
    for answer in accepted:
        lengths, position = answer.tolist(), 0
        while position + draft_length < len(lengths):
            committed = min(lengths[position], draft_length) + 1
            position += committed
            tokens += committed
            steps += 1
    return tokens / steps


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Seconds of each step, and how far the rounds of the measurement were apart."""

    seconds: Mapping[Step, float]
    spread: float  # median over the steps: the middle half of the rounds' times, relative to their median


def time_steps(runner: Runner, steps: Sequence[Step], params: SamplingParams) -> MeasuredSteps:
    """Time steps, sampling included: the median of several rounds over all of them. Scribbles over slots.

    More tokens of as many streams never take less time, whatever was measured.
    """
    times: dict[Step, list[float]] = {step: [] for step in steps}
    began_s = time.perf_counter()
    for done in range(1 + _MAX_ROUNDS):
        for step, seconds in times.items():
            seconds.append(_time_step(runner, *step, params))
        if done >= _MIN_ROUNDS and time.perf_counter() - began_s > _TIMING_S:
            break
    rounds = {step: seconds[1:] for step, seconds in times.items()}  # the first round warms up
    quartiles = [quantiles(seconds, n=4) for seconds in rounds.values()]
    spread = median((upper - lower) / middle for lower, middle, upper in quartiles)
    return MeasuredSteps(never_falling({step: median(seconds) for step, seconds in rounds.items()}), spread)


def time_heads(heads: HeadProposer, runner: Runner, streams: int, length: int) -> tuple[float, float]:
    """Return the seconds of a draft for all streams: what it takes whatever its length, and each token's.

    What is read before is part of the former. Scribbles over slots. length: of the longest draft.
    """
    short_s, long_s = (_time_draft(heads, runner, streams, tokens) for tokens in (1, length))
    token_s = max(long_s - short_s, 0.0) / max(length - 1, 1)
    return short_s - token_s, token_s


def _time_draft(heads: HeadProposer, runner: Runner, streams: int, length: int) -> float:
    params, seconds = SamplingParams(max_tokens=1), []
    for number in range(1 + _HEADS_ROUNDS):
        start = 0 if runner.has_states else _CONTEXT + number
        runner.logits([RowInput(slot, start, [0, 0]) for slot in range(streams)])
        assert runner.hidden is not None
        firsts = range(0, 2 * streams, 2)
        readings = [Reading(slot, start, [0, 0], [first, first + 1], first + 1, 0) for slot, first in enumerate(firsts)]
        began_s = time.perf_counter()
        heads.read(readings, runner.hidden)
        heads.propose([DraftStart(slot, start + 2, params) for slot in range(streams)], length, RANKS)
        seconds.append(time.perf_counter() - began_s)
    return median(seconds[1:])


def never_falling(times: Mapping[Step, float]) -> dict[Step, float]:
    """Return the least-squares fit of times that don't fall as tokens of as many streams are added.

    Neighbours in the wrong order become their mean, again and again (Barlow et al., Statistical Inference under Order
    Restrictions, 1972, section 1.2: pool adjacent violators).
    """
    fitted: dict[Step, float] = {}
    for streams in {streams for streams, _ in times}:
        steps = sorted(step for step in times if step[0] == streams)
        pools: list[list[float]] = []
        for step in steps:
            pools.append([times[step]])
            while len(pools) > 1 and fmean(pools[-2]) > fmean(pools[-1]):
                pools[-2:] = [pools[-2] + pools[-1]]
        fitted |= zip(steps, (fmean(pool) for pool in pools for _ in pool), strict=True)
    return {step: fitted[step] for step in times}


def _time_step(runner: Runner, streams: int, width: int, params: SamplingParams) -> float:
    start = 0 if runner.has_states else _CONTEXT  # a state can't go back to an earlier column but the first
    rows = [RowInput(slot, start, [0] * width, settled=start + 1) for slot in range(streams)]
    history = History(params, [0] * (start + 1), start)
    positions = [Position(history, [0] * j) for _ in rows for j in range(width)]
    began_s = time.perf_counter()
    logits = runner.logits(rows)[: len(positions)]
    sample(logits, SamplingBatch.build(positions, logits.shape[-1], logits.device)).tolist()
    return time.perf_counter() - began_s
