"""What a model that drafts chooses: ranked tokens, their calibrated probabilities, and the trees made of them."""

import math
from bisect import bisect
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafts.draft import Distribution, Draft
from decoding.kernels.choice import StepCall
from decoding.sampling.batch import COLUMNS, SamplingBatch
from decoding.sampling.processors import COMMON
from decoding.sampling.sampler import rank


class DraftChoice(NamedTuple):
    """A proposer's choice of a token, which may follow others that it drafted.

    The gap predicts better than the token's probability whether the best token is the target's (docs/experiments.md).
    """

    tokens: Sequence[int]  # best first
    gap: float  # how clear the choice is, see `RankCalibration`
    drawn_from: Distribution | None = None  # for a choice drawn at random

    @classmethod
    def ranked(cls, tokens: Sequence[float], scores: Sequence[float]) -> "DraftChoice":
        """Build a choice from at least two tokens and their scores, best first; −∞: impossible.

        Where none is possible, or scores are no numbers, it is a guess.
        """
        possible = [int(token) for token, score in zip(tokens, scores, strict=True) if score > -math.inf]
        return cls(possible, scores[0] - scores[1]) if possible else cls([0], 0.0)


RANKS = 3  # ranks that are usually counted: the best token, the second, the third
_GAPS = (0.25, 0.5, 1.0, 1.5, 2.25, 3.0, 4.5)  # bounds between the bins
_DECAY = 0.998  # weight of an observation after the next one in its bin
_PRIOR_TOKENS = 8.0  # the prior counts as this many observations
_MIN_PROBABILITY = 1e-4
_PRIOR_SHARES = (0.4, 0.2)  # shares of ranks 1 and 2 in the probability that the best token is wrong
_PRIOR_FALL = 0.5  # the share of each further rank, relative to the one before


class RankCalibration:
    """Probabilities by gap and rank. Gap: the best noisy score less the second, at least 0. Rank 0 is the best."""

    def __init__(self, ranks: int = RANKS) -> None:
        middles = [(low + high) / 2 for low, high in zip((0.0, *_GAPS), (*_GAPS, _GAPS[-1] + 2), strict=True)]
        self._counts = [[_PRIOR_TOKENS * probability for probability in _prior(gap, ranks)] for gap in middles]
        self._observed = [_PRIOR_TOKENS] * len(middles)

    def probabilities(self, gap: float) -> list[float]:
        """Return the probability that the token of each rank is the target's, [ranks]."""
        index = bisect(_GAPS, gap)
        return [max(count / self._observed[index], _MIN_PROBABILITY) for count in self._counts[index]]

    def note(self, gap: float, rank: int | None) -> None:
        """Count a token of the target. rank: the drafter's rank of it; None: beyond the counted ranks."""
        index = bisect(_GAPS, gap)
        self._counts[index] = [_DECAY * count + (r == rank) for r, count in enumerate(self._counts[index])]
        self._observed[index] = _DECAY * self._observed[index] + 1


def _prior(gap: float, ranks: int) -> Sequence[float]:
    wrong = 0.65 * math.exp(-gap / 2)
    shares = [*_PRIOR_SHARES, *(_PRIOR_SHARES[-1] * _PRIOR_FALL ** (rank + 1) for rank in range(ranks - RANKS))]
    return (1 - wrong, *(wrong * share for share in shares[: ranks - 1]))


Path = tuple[int, ...]  # the rank of each token, from the text down


class Candidates(NamedTuple):
    """What may be at one position, the most probable first."""

    tokens: Sequence[int]  # [n]
    probabilities: Sequence[float]  # [n] that each is the target's, if the tokens before are


def best_tree(levels: Sequence[Candidates], size: int, *, chained: bool = False) -> Draft:
    """Return the `size` paths of candidates that are most probably committed (Sequoia, arXiv 2402.12374, section 3).

    chained: the candidates of a level follow the best ones before them only. The draft's probabilities are conditional.
    """
    paths: list[Path] = []
    heap: list[tuple[float, Path]] = []

    def push(probability: float, parent: Path) -> None:
        if len(parent) < len(levels):
            for rank, share in enumerate(levels[len(parent)].probabilities):
                heappush(heap, (-probability * share, (*parent, rank)))

    push(1.0, ())
    while heap and len(paths) < size:
        negative, path = heappop(heap)
        paths.append(path)
        if not chained or not any(path):
            push(-negative, path)
    return tree_of(levels, paths)


def tree_of(levels: Sequence[Candidates], paths: Sequence[Sequence[int]]) -> Draft:
    """Return a static tree (Medusa, arXiv 2401.10774, section 2.1.2).

    paths: of ranks, each after the path to its parent. What the levels lack is left out, with all below it.
    """
    draft = Draft([], [], [])
    nodes: dict[Path, int] = {(): -1}
    for path in map(tuple, paths):
        if len(path) > len(levels) or path[:-1] not in nodes:
            continue
        level, rank = levels[len(path) - 1], path[-1]
        if rank < min(len(level.tokens), len(level.probabilities)):
            nodes[path] = len(draft.tokens)
            draft.tokens.append(level.tokens[rank])
            draft.parents.append(nodes[path[:-1]])
            draft.probabilities.append(level.probabilities[rank])
    return draft


class ChainChoices(NamedTuple):
    """The settings and choices of B rows' chains of up to C tokens."""

    step: Tensor  # [1] int64, the number of the next token
    settings: Tensor  # [C, B, 6] float64, see `SamplingBatch`
    choices: Tensor  # [C, B, 2, ranks] float64: tokens, best first, and their scores

    @classmethod
    def from_packed(cls, step: Tensor, settings: Tensor, count: int, ranks: int) -> "ChainChoices":
        """Return the choices of `count` rows. settings: [C · B · 6] int64, the bits of the settings."""
        settings = settings.view(torch.float64).view(-1, count, len(COLUMNS))
        choices = torch.empty(len(settings), count, 2, ranks, dtype=torch.float64, device=step.device)
        return cls(step, settings, choices)

    def choose(
        self, logits: Tensor, used: frozenset[str] = frozenset(COMMON), token_ids: Tensor | None = None
    ) -> Tensor:
        """Choose each row's next token, [B] int64, and store it at `step`, which the caller advances.

        logits: [B, V]. used: as in `SamplingBatch`. token_ids: as in `rank`.
        """
        settings = self.settings.index_select(0, self.step)[0]
        tokens, scores = rank(logits, SamplingBatch(settings, used), self.choices.shape[-1], token_ids)
        stored = torch.stack([tokens.double(), scores.double()], dim=1)  # both fit exactly
        self.choices.index_copy_(0, self.step, stored[None])
        return tokens[:, 0]

    def native_call(self, logits: Tensor, next_tokens: Tensor, token_ids: Tensor | None = None) -> StepCall:
        """Return what `step_function` needs to do the same on a CPU. It writes the tokens to `next_tokens`, [B]."""
        assert logits.dtype == torch.float32
        ids = None if token_ids is None else token_ids.data_ptr()
        sizes = *logits.shape, self.choices.shape[-1], torch.get_num_threads()
        inputs = logits.data_ptr(), self.settings.data_ptr(), ids, self.step.data_ptr()
        return StepCall(*inputs, *sizes, next_tokens.data_ptr(), self.choices.data_ptr())

    def read(self, rows: int, length: int) -> list[list[DraftChoice]]:
        """Return the first `length` choices of the first rows. The host waits for the device."""
        choices = self.choices[:length].tolist()
        return [[DraftChoice.ranked(*choices[step][row]) for step in range(length)] for row in range(rows)]
