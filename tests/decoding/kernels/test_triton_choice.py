"""The fused choice in Triton gives the reference's tokens: on a GPU if there is one, else in Triton's interpreter."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.noise_keys import noise_key
from decoding.sampling.processors import COMMON
from decoding.sampling.sampler import _best, _scores
from tests.support.interpreter import DEVICE

from decoding.kernels.triton_choice import choose  # isort: skip

INF = float("inf")
# temperature, top_k, top_p, min_p
SETTINGS = [
    (0.0, 5.0, 0.5, 0.1),  # greedy: the rest does not count
    (1.0, 0.0, 1.0, 0.0),
    (0.3, 0.0, 1.0, 0.0),
    (1.0, 7.0, 1.0, 0.0),
    (2.0, 1.0, 1.0, 0.0),
    (0.7, 0.0, 0.9, 0.0),
    (3.0, 0.0, 0.3, 0.0),
    (1.0, 0.0, 1e-9, 0.0),
    (0.8, 20.0, 0.95, 0.0),
    (5.0, 40.0, 0.5, 0.0),
    (1.0, 0.0, 1.0, 0.2),
    (1.5, 30.0, 0.9, 0.02),
    (1.0, 100000.0, 0.9, 1.0),
]


def settings_of(rows: Sequence[tuple[float, ...]], seed: int) -> Tensor:
    """Return settings with a noise key each, [N, 6]."""
    keys = [noise_key(seed, position) for position in range(len(rows))]
    return torch.tensor([(*row, *key) for row, key in zip(rows, keys, strict=True)], dtype=torch.float64)


def check(
    logits: Tensor, rows: Sequence[tuple[float, ...]], *, seed: int = 0, count: int = 1, block: int = 256
) -> None:
    settings = settings_of(rows, seed)
    wanted, wanted_scores = _best(_scores(logits, SamplingBatch(settings, frozenset(COMMON))), count)
    tokens, scores = choose(logits.to(DEVICE), settings.to(DEVICE), count, block=block)
    torch.testing.assert_close(scores.cpu(), wanted_scores, rtol=1.3e-7, atol=0)
    possible = wanted_scores > -INF
    assert torch.equal(tokens.cpu()[possible], wanted[possible])


def random_logits(rows: int, vocab_size: int, seed: int, spread: float = 4.0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("vocab_size", [3, 300, 1000])
def test_equals_the_reference(vocab_size: int) -> None:
    check(random_logits(len(SETTINGS), vocab_size, vocab_size), SETTINGS)


@pytest.mark.parametrize("block", [64, 256])
def test_some_tokens_get_their_own_noise(block: int) -> None:
    logits, ids = random_logits(len(SETTINGS), 200, 7), torch.arange(200) * 11 + 3
    settings = settings_of(SETTINGS, 8)
    wanted, wanted_scores = _best(_scores(logits, SamplingBatch(settings, frozenset(COMMON)), ids), 3)
    tokens, scores = choose(logits.to(DEVICE), settings.to(DEVICE), 3, ids.to(DEVICE), block=block)
    torch.testing.assert_close(scores.cpu(), wanted_scores, rtol=1.3e-7, atol=0)
    assert torch.equal(tokens.cpu()[wanted_scores > -INF], wanted[wanted_scores > -INF])


def test_ties() -> None:
    """Equal logits stay together in top_k; in top_p the later ones stay."""
    logits = random_logits(len(SETTINGS), 300, 1).round()
    check(logits, SETTINGS, seed=2)
    check(torch.zeros_like(logits), SETTINGS, seed=3)
    check(-logits.abs().round(decimals=-1), SETTINGS, seed=4)


def test_forbidden_tokens() -> None:
    """Masks leave few tokens, or one."""
    logits = random_logits(len(SETTINGS), 500, 2)
    logits[:, 5:] = -INF
    check(logits, SETTINGS, seed=5)
    logits[:, :4] = -INF
    check(logits, SETTINGS, seed=6)


def test_extreme_logits() -> None:
    logits = random_logits(len(SETTINGS), 500, 3, spread=2e4)
    check(logits, SETTINGS, seed=7)
    check(logits * 1e-8 + 5, SETTINGS, seed=8)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
def test_no_score_is_finite_where_a_logit_is_no_number() -> None:
    logits = random_logits(len(SETTINGS), 9000, 3)
    logits[::2, 8000] = math.nan
    logits[1, 5] = INF
    settings = settings_of(SETTINGS, 10)
    scores = choose(logits.to(DEVICE), settings.to(DEVICE), 1)[1].cpu()
    assert not scores[::2].isfinite().any()
    assert not scores[1].isfinite().any()
    assert scores[3::2].isfinite().all()


def test_ranks_several_tokens() -> None:
    check(random_logits(len(SETTINGS), 400, 4), SETTINGS, seed=9, count=4)
