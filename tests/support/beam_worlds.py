"""Tiny language models given as tables, beam search over them, and all their texts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

from decoding.beams.hypothesis import Hypothesis
from decoding.beams.options import BeamOptions
from decoding.beams.search import BeamSearch, beam_noise

World = Callable[[tuple[int, ...]], Tensor]  # tokens of an answer to log-probabilities of the next, [V]


def random_world(seed: int, vocab_size: int) -> World:
    """Independent logits after every text."""

    @cache
    def world(text: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, text)) % 2**63)
        return torch.randn(vocab_size, generator=generator).mul(1.5).log_softmax(-1)

    return world


def table(rows: Mapping[tuple[int, ...], list[float]], *, others: list[float]) -> World:
    """Probabilities by text. others: after all other texts."""
    return lambda text: torch.tensor(rows.get(text, others)).log()


def search(
    world: World,
    options: BeamOptions,
    *,
    max_tokens: int,
    end: int | None = None,
    seed: int | None = None,
    steps: list[list[list[int]]] | None = None,
) -> list[Hypothesis]:
    """Return the answers. seed: samples continuations. steps: receives the live beams after every step."""
    beams = BeamSearch(options, max_tokens=max_tokens, end_token_ids=() if end is None else (end,))
    while not beams.done:
        live = beams.live
        log_probs = torch.stack([world(tuple(text)) for text in live])
        noise = None if seed is None else beam_noise(seed, len(live[0]), *log_probs.shape)
        fork = beams.advance(log_probs, noise)
        assert [[*live[parent], token] for parent, token in zip(*fork, strict=True)] == [*map(list, beams.live)]
        if steps is not None:
            steps.append([list(text) for text in beams.live])
    return beams.best()


def log_prob(world: World, text: Sequence[int]) -> float:
    return sum(float(world(tuple(text[:index]))[token]) for index, token in enumerate(text))


def texts(vocab_size: int, max_tokens: int, end: int) -> Iterator[tuple[int, ...]]:
    """Yield all possible answers."""
    others = [token for token in range(vocab_size) if token != end]
    for length in range(max_tokens):
        yield from ((*text, end) for text in product(others, repeat=length))
    yield from product(others, repeat=max_tokens)


def ranked(world: World, answers: Iterator[tuple[int, ...]], length_penalty: float) -> list[tuple[float, list[int]]]:
    """Return answers with their scores, best first."""
    scores = ((log_prob(world, text) / math.pow(len(text), length_penalty), list(text)) for text in answers)
    return sorted(scores, reverse=True)
