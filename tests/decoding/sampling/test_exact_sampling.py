"""Both rules of verification give samples of the target's distribution, whatever is drafted.

The models are Markov chains over three tokens, so that the joint distribution of several positions is known. Every case
makes at least 200 000 draws, with fixed seeds; one alone gives a false alarm with a probability of 1e-8, all together
with less than 1e-6.
"""

from collections.abc import Sequence
from functools import cache, reduce

import pytest
import torch
from torch import Tensor

from decoding.drafts.draft import Distribution, Draft
from decoding.drafts.verification import (
    RejectionRow,
    Verdict,
    accepted_path,
    distributions,
    draft_key,
    draw,
    verify_by_rejection,
)
from decoding.sampling.noise import gumbel
from decoding.sampling.noise_keys import noise_key
from tests.support.chi_square import count, p_value

VOCAB = 3
START = 0  # the token before the draft
POSITION = 10  # absolute, of the first draft token
TARGET = torch.tensor([[0.5, 0.2, 0.3], [0.25, 0.6, 0.15], [0.15, 0.35, 0.5]])
DRAFTER = torch.tensor([[0.2, 0.6, 0.2], [0.4, 0.3, 0.3], [0.1, 0.2, 0.7]])
LEAST_P = 1e-8
DRAWS = 204_000


@cache
def keys(count: int, position: int, fence: int | None = None) -> Tensor:
    """Return noise keys, [count, 2], of seeds 0…count−1; without a fence those of the target's own noise."""
    make = noise_key if fence is None else draft_key
    return torch.tensor([make(seed, position, fence or 0) for seed in range(count)], dtype=torch.int32)


def joint(length: int, start: int = START) -> Tensor:
    """Return the target's joint distribution of `length` tokens, [VOCAB ** length]."""
    step = reduce(lambda probs, _: (probs[..., None] * TARGET).flatten(0, -2), range(length - 1), TARGET[start])
    return step.flatten()


def cells(texts: Tensor) -> Tensor:
    """Return a number for each text, [N]. texts: [N, T]"""
    return reduce(lambda number, token: number * VOCAB + token, texts.unbind(-1), torch.zeros(len(texts)).long())


def complete(starts: Sequence[list[int]], length: int) -> Tensor:
    """Continue texts from the target's distribution with other random numbers, [N, length]."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([len(start) for start in starts])
    texts = torch.tensor([[*start, *[0] * length][:length] for start in starts])
    for position in range(1, length):
        drawn = torch.multinomial(TARGET[texts[:, position - 1]], 1, generator=generator)[:, 0]
        texts[:, position] = torch.where(lengths > position, texts[:, position], drawn)
    return texts


def make_drafts(shape: list[int], drawn: set[int], rows: int, top_k: int) -> list[Draft]:
    """Make drafts with these parents. Children of the indices in `drawn` are drawn, others follow from their parent."""
    tokens = torch.full((rows, len(shape) + 1), START)  # by index + 1
    origins: list[list[Distribution | None]] = [[None] * rows for _ in shape]
    depths = Draft([0] * len(shape), shape).depths()
    for parent in dict.fromkeys(shape):
        children = [index for index, other in enumerate(shape) if other == parent]
        above = tokens[:, parent + 1]
        if parent in drawn:
            position = POSITION + depths[children[0]] - 1
            _, ids, probs = draw(DRAFTER[above].log(), keys(rows, position, POSITION), top_k)
            row_origins: list[Distribution | None] = [*distributions(ids, probs)]
        for rank, index in enumerate(children):
            tokens[:, index + 1] = ids[:, rank] if parent in drawn else (above + 1 + rank) % VOCAB
            if parent in drawn:
                origins[index] = row_origins
    return [
        Draft(row_tokens, shape, [], [origin[row] for origin in origins])
        for row, row_tokens in enumerate(tokens[:, 1:].tolist())
    ]


def target_probs(drafts: Sequence[Draft]) -> Tensor:
    """Return the probabilities for `verify_by_rejection`, [N, V]."""
    return TARGET[torch.tensor([[START, *draft.tokens] for draft in drafts]).flatten()]


def committed(draft: Draft, verdict: Verdict) -> list[int]:
    return [*(draft.tokens[index] for index in verdict.path), verdict.own]


CHAIN = [-1, 0, 1]
TREE = [-1, -1, 0, 0, 1]  # two tokens, below the first two more, below the second one
FORK = [-1, 0, 1, 1]  # a chain of two, which branches
CHAINS = [-1, -1, 0, 2]  # two tokens, below the first a chain of two
CASES = {
    "chain, drawn, block": (CHAIN, {-1, 0, 1}, 2, True),
    "chain, drawn, classical": (CHAIN, {-1, 0, 1}, 2, False),
    "chain, not drawn, block": (CHAIN, set[int](), 3, True),
    "chain, drawn in part, block": (CHAIN, {-1, 1}, 3, True),
    "tree, drawn": (TREE, {-1, 0, 1}, 3, True),
    "a chain that branches, drawn in part, block": (FORK, {-1, 0}, 2, True),
    "chains below a branching, drawn, block": (CHAINS, {-1, 0, 2}, 2, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_rejection_sampling(case: str) -> None:
    """The joint distribution of as many tokens as one step can commit, the recovered and the bonus token included."""
    shape, drawn, top_k, block = CASES[case]
    drafts = make_drafts(shape, drawn, DRAWS // (len(shape) + 1), top_k)
    length = max(drafts[0].depths()) + 1
    rows = [RejectionRow(draft, seed, POSITION) for seed, draft in enumerate(drafts)]
    verdicts = verify_by_rejection(target_probs(drafts), rows, block=block)
    texts = complete([committed(*pair) for pair in zip(drafts, verdicts, strict=True)], length)
    assert p_value(count(cells(texts), VOCAB**length), joint(length)) > LEAST_P


def test_shared_noise() -> None:
    """The same under the coupled rule."""
    rows, length = DRAWS // 4, 4
    own = torch.full((rows, 1), START)
    drafted = torch.full((rows, 1), START)
    for depth in range(length):
        noise = gumbel(keys(rows, POSITION + depth), VOCAB)
        own = torch.cat([own, (TARGET[drafted[:, -1]].log() + noise).argmax(-1, keepdim=True)], -1)
        drafted = torch.cat([drafted, (DRAFTER[drafted[:, -1]].log() + noise).argmax(-1, keepdim=True)], -1)
    texts = []
    for sampled, tokens in zip(own[:, 1:].tolist(), drafted[:, 1:length].tolist(), strict=True):
        path, _ = accepted_path(sampled, Draft(tokens, CHAIN))
        texts.append([*tokens[: len(path)], sampled[len(path)]])
    assert p_value(count(cells(complete(texts, length)), VOCAB**length), joint(length)) > LEAST_P
