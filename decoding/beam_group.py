"""One group of beams: which of their continuations live on, which are finished, and when there is nothing to gain.

The rules are those of transformers' `generate(num_beams=…)`, with random continuations those of its beam sampling.
Words that must appear add the candidates and the banks of dynamic beam allocation (Post and Vilar, arXiv 1804.06609,
section 3; Hokamp and Liu, arXiv 1704.07138). Knows nothing of models or of other groups.
"""

import math
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.beam_options import BeamOptions
from decoding.force_words import ForceWords, Progress
from decoding.stopping import FinishReason
from decoding.transfer import tensor_on


class Beam(NamedTuple):
    """A text that may go on."""

    tokens: list[int]
    log_prob: float  # of all its tokens together, after processors and penalties
    progress: Progress


class Hypothesis(NamedTuple):
    """A finished text, its end token included."""

    tokens: list[int]
    score: float  # log_prob / length ** length_penalty
    log_prob: float
    finish: FinishReason


class Fork(NamedTuple):
    """The beams of a next step: each continues one of this step's with a token. Empty: the search is over."""

    parents: list[int]  # [B] indices of this step's beams
    tokens: list[int]  # [B]


class _Candidate(NamedTuple):
    parent: int
    token: int
    log_prob: float
    progress: Progress


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
        """One token more for every live beam.

        Args:
            log_probs: [B, V] float32 after each of the live beams.
            noise: [B, V] standard Gumbel noise, to draw continuations instead of taking the best ones.
        """
        self._length += 1
        candidates = self._candidates(log_probs, noise)
        complete = [one for one in candidates if self._words.missing(one.progress) == 0]
        self._finish([one for one in complete[: self._size] if self._is_end(one)])
        going_on = [one for one in candidates if not self._is_end(one)]
        chosen = [] if self._length == self._max_tokens else self._in_banks(going_on)
        if chosen and not self._may_improve(chosen[0].log_prob):
            chosen = []
        parents = self.live
        self.live = [Beam([*parents[one.parent].tokens, one.token], one.log_prob, one.progress) for one in chosen]
        return Fork([one.parent for one in chosen], [one.token for one in chosen])

    def _candidates(self, log_probs: Tensor, noise: Tensor | None) -> list[_Candidate]:
        """Enough for all beams to go on even if some end, in the order of their scores or as drawn.

        To add noise to log-probabilities and take the best is to draw without replacement (Kool et al.,
        arXiv 1903.06059, section 3).
        """
        totals = log_probs + tensor_on(log_probs.device, [beam.log_prob for beam in self.live], torch.float32)[:, None]
        ends = [token for token in self._ends if token < log_probs.shape[1]]
        for row, beam in enumerate(self.live):
            if self._words.missing(beam.progress):
                totals[row, ends] = -math.inf
        ranking = (totals if noise is None else totals + noise).flatten()  # [B · V]
        count = max(2, 1 + len(self._ends)) * self._size
        places = ranking.topk(min(count, len(ranking))).indices
        if self._options.force_words_ids:
            places = self._with_wanted(places, totals)
            places = places[ranking[places].argsort(descending=True, stable=True)]
        found = zip(places.tolist(), totals.flatten()[places].tolist(), strict=True)
        width = log_probs.shape[1]
        return [self._candidate(place // width, place % width, total) for place, total in found if total > -math.inf]

    def _with_wanted(self, places: Tensor, totals: Tensor) -> Tensor:
        """Also the tokens that bring a beam on with its words, and the best of each beam. totals: [B, V]."""
        vocab_size = totals.shape[1]
        tokens = [(row, token) for row, beam in enumerate(self.live) for token in self._words.wanted(beam.progress)]
        known = [row * vocab_size + token for row, token in tokens if token < vocab_size]
        best = torch.arange(len(totals), device=totals.device) * vocab_size + totals.argmax(dim=-1)
        wanted = tensor_on(totals.device, known, torch.int64)
        found: Tensor = torch.cat([places, best, wanted]).unique()
        return found

    def _candidate(self, parent: int, token: int, log_prob: float) -> _Candidate:
        return _Candidate(parent, token, log_prob, self._words.after(self.live[parent].progress, token))

    def _is_end(self, candidate: _Candidate) -> bool:
        return self._length == self._max_tokens or candidate.token in self._ends

    def _finish(self, ended: list[_Candidate]) -> None:
        """Add texts to the finished ones, and keep the best."""
        for one in ended:
            score = self._score(one.log_prob, self._length)
            reason: FinishReason = "stop" if one.token in self._ends else "length"
            tokens = [*self.live[one.parent].tokens, one.token]
            self.finished.append(Hypothesis(tokens, score, one.log_prob, reason))
        self.finished.sort(key=lambda one: one.score, reverse=True)
        del self.finished[self._size :]

    def _in_banks(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """The next beams, best first. Each bank has those that lack equally many tokens of their words.

        Banks take turns, the one that lacks least first; those that no longer have the room for what they lack, last.
        """
        room = self._max_tokens - self._length
        taken: Counter[int] = Counter()
        turns: list[tuple[bool, int, int]] = []
        ranked = sorted(candidates, key=lambda one: one.log_prob, reverse=True)
        for one in ranked:
            missing = self._words.missing(one.progress)
            turns.append((missing > room, taken[missing], missing))
            taken[missing] += 1
        order = sorted(range(len(ranked)), key=turns.__getitem__)[: self._size]
        return [ranked[at] for at in sorted(order)]

    def _may_improve(self, best: float) -> bool:
        """Whether the search should go on. best: the log-probability of the best live beam."""
        if len(self.finished) < self._size:
            return True
        if self._options.early_stopping is True:
            return False
        longest = self._options.early_stopping == "never" and self._options.length_penalty > 0
        return self._score(best, self._max_tokens if longest else self._length) > self.finished[-1].score

    def _score(self, log_prob: float, length: int) -> float:
        return log_prob / math.pow(length, self._options.length_penalty)
