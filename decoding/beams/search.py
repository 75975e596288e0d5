"""Beam search as a state machine: it takes log-probabilities and returns which beams fork, and with which tokens.

With several groups it is diverse beam search (Vijayakumar et al., arXiv 1610.02424, section 3, Hamming diversity):
groups choose one after another, and tokens that earlier groups chose are penalised. Knows nothing of models or caches.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from decoding.beams.group import BeamGroup, Fork, Hypothesis
from decoding.beams.options import BeamOptions
from decoding.sampling.noise import choice_seed, gumbel, noise_key
from decoding.sampling.transfer import tensor_on


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

        Args:
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
