"""Beam search as a state machine: log-probabilities in, which beams fork and with which tokens out.

Several groups of beams make diverse beam search (Vijayakumar et al., arXiv 1610.02424, section 3, Hamming diversity):
at each step the groups choose one after another, and what the earlier ones chose is made less attractive to the later.
Knows nothing of models, caches or texts before the answer.
"""

from collections.abc import Collection, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from decoding.beam_group import BeamGroup, Fork, Hypothesis
from decoding.beam_options import BeamOptions
from decoding.noise import choice_seed, gumbel, noise_key
from decoding.transfer import tensor_on


class BeamSearch:
    """The search for one request's answers. It begins with one empty beam per group."""

    def __init__(self, options: BeamOptions, *, max_tokens: int, end_token_ids: Collection[int] = ()) -> None:
        """
        max_tokens: at most so many in an answer.
        end_token_ids: after which an answer ends.
        """
        self._options = options
        size = options.num_beams // options.num_beam_groups
        self._groups = [
            BeamGroup(options, size=size, max_tokens=max_tokens, end_token_ids=end_token_ids)
            for _ in range(options.num_beam_groups)
        ]

    @property
    def live(self) -> list[Sequence[int]]:
        """The answers so far of the B beams that go on, in the order of a step's rows."""
        return [beam.tokens for group in self._groups for beam in group.live]

    @property
    def finished(self) -> list[Hypothesis]:
        """The answers that have ended and are among the best so far, of one group after the other."""
        return [one for group in self._groups for one in group.finished]

    @property
    def done(self) -> bool:
        """Whether no beam goes on."""
        return not any(group.live for group in self._groups)

    def advance(self, log_probs: Tensor, noise: Tensor | None = None) -> Fork:
        """Take one step.

        Args:
            log_probs: [B, V] float32 after each live beam, with the request's processors applied; they need no
                normalisation. −∞ is never chosen.
            noise: [B, V] as `beam_noise` makes it, to draw continuations; without it the best are taken.
        """
        starts = [0, *accumulate(len(group.live) for group in self._groups)]
        chosen = torch.zeros(log_probs.shape[1], device=log_probs.device)  # [V] how often, by the groups so far
        parents: list[int] = []
        tokens: list[int] = []
        for group, start, end in zip(self._groups, starts, starts[1:], strict=False):
            if start == end:
                continue
            own = log_probs[start:end] - self._options.diversity_penalty * chosen
            fork = group.advance(own, None if noise is None else noise[start:end])
            for token in fork.tokens:
                chosen[token] += 1
            parents += [start + parent for parent in fork.parents]
            tokens += fork.tokens
        return Fork(parents, tokens)

    def best(self) -> list[Hypothesis]:
        """The finished answers asked for, best first; fewer where so many don't have the words that must appear.

        What several groups found comes last but for the first time.
        """
        ranked = sorted(self.finished, key=lambda one: -one.score)
        distinct: dict[tuple[int, ...], Hypothesis] = {}
        for one in ranked:
            distinct.setdefault(tuple(one.tokens), one)
        repeated = [one for one in ranked if distinct[tuple(one.tokens)] is not one]
        return [*distinct.values(), *repeated][: self._options.num_return_sequences]


def beam_noise(seed: int, position: int, beams: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """[B, V] Gumbel noise for the continuations of B beams at one position of the text.

    Beam b sees what the b-th of several answers to a request with this seed would see there.
    """
    keys = [noise_key(choice_seed(seed, beam), position) for beam in range(beams)]
    return gumbel(tensor_on(device, keys, torch.int32), vocab_size)
