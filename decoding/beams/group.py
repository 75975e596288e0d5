"""One group of beams: chooses the continuations that stay live or finish, and ends the search.

The rules are those of transformers' `generate(num_beams=…)`, and with noise those of its beam sampling. Forced words
use the candidates and banks of dynamic beam allocation (Post and Vilar, arXiv 1804.06609, section 3; Hokamp and Liu,
arXiv 1704.07138). Knows nothing of models or other groups.
"""

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.beams.force_words import ForceWords, WordProgress
from decoding.beams.options import BeamOptions
from decoding.errors import UnavailableError
from decoding.sampling.stopping import FinishReason
from decoding.sampling.transfer import tensor_on


class Beam(NamedTuple):
    """An unfinished answer."""

    tokens: list[int]
    log_prob: float  # sum over its tokens, after processors and penalties
    progress: WordProgress


class Hypothesis(NamedTuple):
    """A finished answer, its end token included."""

    tokens: list[int]
    score: float  # log_prob / length ** length_penalty
    log_prob: float
    finish: FinishReason


class Fork(NamedTuple):
    """The beams of the next step: each continues a beam of this step with a token. Empty: the search is over."""

    parents: list[int]  # [B] indices of beams of this step
    tokens: list[int]  # [B]


class _Candidate(NamedTuple):
    parent: int
    token: int
    log_prob: float
    progress: WordProgress


class BeamGroup:
    """`size` beams that compete with each other."""

    def __init__(self, options: BeamOptions, *, size: int, max_tokens: int, end_token_ids: Collection[int]) -> None:
        self._options, self._size, self._max_tokens = options, size, max_tokens
        self._ends = frozenset(end_token_ids)
        self._words = ForceWords(options.force_words_ids)
        self._length = 0
        self.live = [Beam([], 0.0, self._words.start)]  # best first
        self.finished: list[Hypothesis] = []  # best first, at most `size`

    def advance(self, log_probs: Tensor, noise: Tensor | None = None) -> Fork:
        """Extend every live beam by a token.

        Args:
            log_probs: [B, V] float32 after each live beam.
            noise: [B, V] standard Gumbel noise, to draw continuations; None: take the best.

        Raises:
            UnavailableError: a log-probability is NaN.
        """
        self._length += 1
        candidates = self._candidates(log_probs, noise)
        complete = [candidate for candidate in candidates if self._words.missing_count(candidate.progress) == 0]
        self._finish([candidate for candidate in complete[: self._size] if self._is_end(candidate)])
        unfinished = [candidate for candidate in candidates if not self._is_end(candidate)]
        chosen = [] if self._length == self._max_tokens else self._allocate(unfinished)
        if chosen and not self._may_improve(chosen[0].log_prob):
            chosen = []
        parents = self.live
        self.live = [Beam([*parents[c.parent].tokens, c.token], c.log_prob, c.progress) for c in chosen]
        return Fork([c.parent for c in chosen], [c.token for c in chosen])

    def _candidates(self, log_probs: Tensor, noise: Tensor | None) -> list[_Candidate]:
        """Return enough candidates for all beams to go on even if some end, by score or in the order of the draw.

        The best log-probabilities plus noise are a draw without replacement (Kool et al., arXiv 1903.06059, section 3).
        """
        totals = log_probs + tensor_on(log_probs.device, [beam.log_prob for beam in self.live], torch.float32)[:, None]
        ends = [token for token in self._ends if token < log_probs.shape[1]]
        for row, beam in enumerate(self.live):
            if self._words.missing_count(beam.progress):
                totals[row, ends] = -math.inf
        ranking = (totals if noise is None else totals + noise).flatten()  # [B · V]
        count = max(2, 1 + len(self._ends)) * self._size
        indices = ranking.topk(min(count, len(ranking))).indices
        if self._options.force_words_ids:
            indices = self._add_forced(indices, totals)
            indices = indices[ranking[indices].argsort(descending=True, stable=True)]
        values = totals.flatten()[indices].tolist()
        if any(map(math.isnan, values)):  # they rank above all numbers
            raise UnavailableError("the model's logits are not finite numbers")
        scored = zip(indices.tolist(), values, strict=True)
        width = log_probs.shape[1]
        return [self._candidate(index // width, index % width, total) for index, total in scored if total > -math.inf]

    def _add_forced(self, indices: Tensor, totals: Tensor) -> Tensor:
        """Add the tokens that advance a beam's forced words, and each beam's best token. totals: [B, V]."""
        vocab_size = totals.shape[1]
        tokens = [
            (row, token) for row, beam in enumerate(self.live) for token in self._words.next_tokens(beam.progress)
        ]
        known = [row * vocab_size + token for row, token in tokens if token < vocab_size]
        best = torch.arange(len(totals), device=totals.device) * vocab_size + totals.argmax(dim=-1)
        forced = tensor_on(totals.device, known, torch.int64)
        merged: Tensor = torch.cat([indices, best, forced]).unique()
        return merged

    def _candidate(self, parent: int, token: int, log_prob: float) -> _Candidate:
        return _Candidate(parent, token, log_prob, self._words.advance(self.live[parent].progress, token))

    def _is_end(self, candidate: _Candidate) -> bool:
        return self._length == self._max_tokens or candidate.token in self._ends

    def _finish(self, ended: list[_Candidate]) -> None:
        """Add answers to the finished ones, and keep the best."""
        for candidate in ended:
            score = self._score(candidate.log_prob, self._length)
            reason: FinishReason = "stop" if candidate.token in self._ends else "length"
            tokens = [*self.live[candidate.parent].tokens, candidate.token]
            self.finished.append(Hypothesis(tokens, score, candidate.log_prob, reason))
        self.finished.sort(key=lambda hypothesis: hypothesis.score, reverse=True)
        del self.finished[self._size :]

    def _allocate(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Choose the next beams, best first. A bank holds candidates with the same number of missing word tokens.

        Banks take turns, those that miss fewest tokens first. Banks without room for their missing tokens come last.
        """
        room = self._max_tokens - self._length
        taken: Counter[int] = Counter()
        turns: list[tuple[bool, int, int]] = []
        ranked = sorted(candidates, key=lambda candidate: candidate.log_prob, reverse=True)
        for candidate in ranked:
            missing = self._words.missing_count(candidate.progress)
            turns.append((missing > room, taken[missing], missing))
            taken[missing] += 1
        order = sorted(range(len(ranked)), key=turns.__getitem__)[: self._size]
        return [ranked[index] for index in sorted(order)]

    def _may_improve(self, best: float) -> bool:
        """Whether a live beam can still enter the finished answers. best: the best live log-probability."""
        if len(self.finished) < self._size:
            return True
        if self._options.early_stopping is True:
            return False
        longest = self._options.early_stopping == "never" and self._options.length_penalty > 0
        return self._score(best, self._max_tokens if longest else self._length) > self.finished[-1].score

    def _score(self, log_prob: float, length: int) -> float:
        return log_prob / math.pow(length, self._options.length_penalty)
