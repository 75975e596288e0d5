"""Beam search as a state machine: it takes log-probabilities and returns which beams fork, and with which tokens.

The rules are those of transformers' `generate(num_beams=…)`, and with noise those of its beam sampling. Forced words
use the candidates and banks of dynamic beam allocation (Post and Vilar, arXiv 1804.06609, section 3; Hokamp and Liu,
arXiv 1704.07138). With several groups it is diverse beam search (Vijayakumar et al., arXiv 1610.02424, section 3,
Hamming diversity): groups choose one after another, and tokens that earlier groups chose are penalised.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.errors import UnavailableError
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import choice_seed, noise_key
from decoding.sampling.stopping import FinishReason
from decoding.sampling.transfer import tensor_on

WordProgress = tuple[int, ...]  # the state of each word's automaton

_MET = -1
_ROOT = 0


class ForceWords:
    """The forced words of a request. `start` and `advance` make progress values."""

    def __init__(self, words: Sequence[Sequence[Sequence[int]]]) -> None:
        """words: the phrases of each word, none of them empty."""
        self._words = [_Word(phrases) for phrases in words]
        self.start: WordProgress = (_ROOT,) * len(words)

    def advance(self, progress: WordProgress, token: int) -> WordProgress:
        """Return the progress after one more token."""
        return tuple(word.advance(state, token) for word, state in zip(self._words, progress, strict=True))

    def missing_count(self, progress: WordProgress) -> int:
        """Return the number of tokens that complete the words one by one; 0: all words appear."""
        return sum(word.missing_count(state) for word, state in zip(self._words, progress, strict=True))

    def next_tokens(self, progress: WordProgress) -> set[int]:
        """Return the tokens that begin or continue a phrase of a missing word."""
        pairs = zip(self._words, progress, strict=True)
        return set(chain.from_iterable(word.next_tokens(state) for word, state in pairs))


class _Word:
    """The Aho–Corasick automaton of one word's phrases (CACM 18, 1975). Its states are prefixes of phrases."""

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._children: list[dict[int, int]] = [{}]
        self._shortest = [min(map(len, phrases))]  # tokens from each state to the nearest end of a phrase
        for phrase in phrases:
            self._insert(phrase)
        self._suffix = [_ROOT] * len(self._children)  # suffix links: each state's longest proper suffix that is a state
        self._link()

    def _insert(self, phrase: Sequence[int]) -> None:
        state = _ROOT
        for remaining, token in zip(range(len(phrase) - 1, -1, -1), phrase, strict=True):
            if token not in self._children[state]:
                self._children[state][token] = len(self._children)
                self._children.append({})
                self._shortest.append(remaining)
            state = self._children[state][token]
            self._shortest[state] = min(self._shortest[state], remaining)

    def _link(self) -> None:
        """Set suffix links breadth first, because longer states need those of shorter ones."""
        queue = deque(self._children[_ROOT].values())
        while queue:
            state = queue.popleft()
            for token, child in self._children[state].items():
                self._suffix[child] = self._step(self._suffix[state], token)
                queue.append(child)

    def _step(self, state: int, token: int) -> int:
        suffixes = self._suffixes(state)
        return next((self._children[suffix][token] for suffix in suffixes if token in self._children[suffix]), _ROOT)

    def _suffixes(self, state: int) -> Iterator[int]:
        """Yield the state and its suffixes, down to the root."""
        while state != _ROOT:
            yield state
            state = self._suffix[state]
        yield _ROOT

    def advance(self, state: int, token: int) -> int:
        if state == _MET:
            return _MET
        state = self._step(state, token)
        return _MET if self.missing_count(state) == 0 else state

    def missing_count(self, state: int) -> int:
        return 0 if state == _MET else min(self._shortest[suffix] for suffix in self._suffixes(state))

    def next_tokens(self, state: int) -> Iterator[int]:
        suffixes = () if state == _MET else self._suffixes(state)
        return chain.from_iterable(self._children[suffix] for suffix in suffixes)


class Beam(NamedTuple):
    """An unfinished answer."""

    tokens: list[int]
    log_prob: float  # sum over its tokens, after processors and penalties
    progress: WordProgress


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


class BeamSearch:
    """The search of one request. It starts with one empty beam per group."""

    def __init__(self, options: BeamOptions, *, max_tokens: int, end_token_ids: Collection[int] = ()) -> None:
        """
        max_tokens: maximum length of an answer.
        end_token_ids: tokens that end an answer.
        """
        self._options = options
        size = options.num_beams // options.num_beam_groups
        self._groups = [
            BeamGroup(options, size=size, max_tokens=max_tokens, end_token_ids=end_token_ids)
            for _ in range(options.num_beam_groups)
        ]

    @property
    def live(self) -> list[Sequence[int]]:
        """The answers so far of the B live beams, in the order of a step's rows."""
        return [beam.tokens for group in self._groups for beam in group.live]

    @property
    def finished(self) -> list[Hypothesis]:
        """The best finished answers so far, group by group."""
        return [hypothesis for group in self._groups for hypothesis in group.finished]

    @property
    def done(self) -> bool:
        """Whether no beam is live."""
        return not any(group.live for group in self._groups)

    def advance(self, log_probs: Tensor, noise: Tensor | None = None) -> Fork:
        """Take one step.

        log_probs: [B, V] float32 after each live beam, with the request's processors applied. They need no
            normalisation; −∞ is never chosen.
        noise: [B, V] from `beam_noise`, to draw continuations; None: take the best.
        """
        starts = [0, *accumulate(len(group.live) for group in self._groups)]
        chosen = torch.zeros(log_probs.shape[1], device=log_probs.device)  # [V] counts of the groups before
        parents: list[int] = []
        tokens: list[int] = []
        for group, start, end in zip(self._groups, starts, starts[1:], strict=False):
            if start == end:
                continue
            penalised = log_probs[start:end] - self._options.diversity_penalty * chosen
            fork = group.advance(penalised, None if noise is None else noise[start:end])
            for token in fork.tokens:
                chosen[token] += 1
            parents += [start + parent for parent in fork.parents]
            tokens += fork.tokens
        return Fork(parents, tokens)

    def best(self) -> list[Hypothesis]:
        """Return `num_return_sequences` finished answers, best first, repetitions across groups last.

        There are fewer if too few answers contain the forced words.
        """
        ranked = sorted(self.finished, key=lambda hypothesis: -hypothesis.score)
        distinct: dict[tuple[int, ...], Hypothesis] = {}
        for hypothesis in ranked:
            distinct.setdefault(tuple(hypothesis.tokens), hypothesis)
        repeated = [hypothesis for hypothesis in ranked if distinct[tuple(hypothesis.tokens)] is not hypothesis]
        return [*distinct.values(), *repeated][: self._options.num_return_sequences]


def beam_noise(seed: int, position: int, beams: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return Gumbel noise for the continuations of B beams at one position of the text, [B, V].

    Beam b has the noise of the b-th of several answers to a request with this seed.
    """
    keys = [noise_key(choice_seed(seed, beam), position) for beam in range(beams)]
    return gumbel(tensor_on(device, keys, torch.int32), vocab_size)
