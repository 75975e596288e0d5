"""The noise is standard Gumbel, independent in every coordinate, and stable."""

import math
from itertools import combinations

import pytest
import torch
from torch import Tensor

from decoding.sampling.noise import gumbel, uniform
from decoding.sampling.noise_keys import ACCEPTANCE, OWN_TOKENS, choice_seed, draft_stream, noise_key
from decoding.sampling.params import MAX_SEED
from tests.support.chi_square import count, p_value

DRAWS = 200_000
GOLDEN_KEYS = [
    (0, 1445982368),
    (1317927411, 166190782),
    (-2032993677, -2068968356),
    (-592688009, -2121242496),
]
GOLDEN_VALUES = [
    [-1.0100622, 0.1293505, 2.5020974, -0.5422601, 1.7301217],
    [-0.8816397, -0.3400567, -0.9411836, 1.0451143, 1.9493792],
    [0.5922744, 0.8284837, -0.0966263, 0.6853015, 0.4632310],
]


def noise(seeds: list[int], positions: list[int], vocab_size: int) -> Tensor:
    """Return a row per pair of seed and position, [N, V]."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return gumbel(torch.tensor(keys, dtype=torch.int32), vocab_size)


ORDERS = {
    "positions": (lambda i: 7, lambda i: i),
    "seeds": (lambda i: i, lambda i: 5),
    "both": (lambda i: i * 0x9E3779B97F4A7C15 % 2**63, lambda i: i % 2048),
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_largest_noisy_log_probability_is_a_sample(order: str) -> None:
    """Chi-square over 8 tokens; false alarm 1e-7."""
    seed, position = ORDERS[order]
    probabilities = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])
    g = noise([seed(i) for i in range(DRAWS)], [position(i) for i in range(DRAWS)], 8)
    drawn = (probabilities.log() + g).argmax(-1)
    assert p_value(count(drawn, 8), probabilities) > 1e-7


@pytest.mark.slow
def test_a_large_vocabulary_is_sampled_fairly() -> None:
    """Uniform over 32 768 tokens, counted in 64 blocks and by the low six bits; false alarm 2e-7."""
    g = torch.cat(
        [noise([3] * 500, list(range(start, start + 500)), 32_768).argmax(-1) for start in range(0, 4000, 500)]
    )
    uniform = torch.full((64,), 1 / 64)
    assert p_value(count(g // 512, 64), uniform) > 1e-7
    assert p_value(count(g % 64, 64), uniform) > 1e-7


def test_the_values_have_the_gumbel_distribution() -> None:
    """Mean and variance within 6 standard errors (false alarm 2e-9 each); 64 equal bins, chi-square, 1e-7."""
    g = noise([11] * 250, list(range(250)), 4000).double().flatten()  # a million values
    variance = math.pi**2 / 6
    assert abs(float(g.mean()) - 0.5772156649015329) < 6 * math.sqrt(variance / g.numel())
    fourth_moment = (12 / 5 + 3) * variance**2  # excess kurtosis of a Gumbel variable: 12/5
    assert abs(float(g.var()) - variance) < 6 * math.sqrt((fourth_moment - variance**2) / g.numel())
    uniform = torch.exp(-torch.exp(-g))
    assert p_value(count((uniform * 64).long().clamp(max=63), 64), torch.full((64,), 1 / 64)) > 1e-7


@pytest.mark.parametrize("neighbour", ["position", "seed", "high half of the seed", "token", "swapped"])
def test_neighbours_are_independent(neighbour: str) -> None:
    """Contingency table of 8 x 8 equal bins, chi-square against the product; false alarm 1e-7."""
    n, vocab_size = 400, 501
    seeds, positions = [i // 20 for i in range(n)], [i % 20 for i in range(n)]
    g = noise(seeds, positions, vocab_size)
    if neighbour == "token":
        first, second = g[:, :-1:2], g[:, 1::2]
    else:
        other = {
            "position": (seeds, [p + 1 for p in positions]),
            "seed": ([s + 1 for s in seeds], positions),
            "high half of the seed": ([s + 2**32 for s in seeds], positions),
            "swapped": ([p + 100 for p in positions], [s + 100 for s in seeds]),
        }[neighbour]
        keep = [i for i in range(n) if neighbour not in ("position", "seed") or (positions[i] + seeds[i]) % 2 == 0]
        first, second = g[keep], noise(*other, vocab_size)[keep]
    bins = [(torch.exp(-torch.exp(-side.double())) * 8).long().clamp(max=7).flatten() for side in (first, second)]
    table = count(bins[0] * 8 + bins[1], 64)
    assert p_value(table, torch.full((64,), 1 / 64)) > 1e-7


def test_every_value_is_finite_and_the_upper_tail_is_fine_grained() -> None:
    g = torch.cat([noise([seed] * 100, list(range(100)), 50_000).flatten() for seed in range(4)])  # 20 million
    assert g.isfinite().all()
    assert float(g.min()) >= -3.11
    top = g.topk(2000).values
    assert float(top[0]) > 15  # the largest of 2e7 exceeds ln(2e7) - 1.8
    assert len(top.unique()) > 1950  # 31 bits: about ten of 2 000 coincide


def test_a_row_does_not_depend_on_its_batch_or_vocabulary() -> None:
    alone = noise([123], [45], 100)
    batched = noise([9, 123, 9], [1, 45, 2], 1000)
    assert torch.equal(batched[1, :100], alone[0])


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (2**63 - 1, 2**31 - 1), (2**64 - 1, 0), (2**32, 1)])
def test_extreme_keys_work(seed: int, position: int) -> None:
    assert all(-(2**31) <= key < 2**31 for key in noise_key(seed, position))
    assert noise([seed], [position], 64).isfinite().all()


def test_golden_values() -> None:
    """Stored texts depend on the noise, so a change breaks every seed."""
    assert [noise_key(0, 0), noise_key(1, 0), noise_key(0, 1), noise_key(2**62 + 12345, 678)] == GOLDEN_KEYS
    values = noise([0, 42, 2**62 + 12345], [0, 7, 678], 5)
    torch.testing.assert_close(values, torch.tensor(GOLDEN_VALUES), atol=2e-6, rtol=0)


def test_streams_are_independent() -> None:
    """Contingency tables of 8 x 8 equal bins, chi-square against the product; false alarm 1e-7 each."""
    streams = [OWN_TOKENS, ACCEPTANCE, draft_stream(0), draft_stream(1), draft_stream(1000)]
    assert len(set(streams)) == len(streams)
    bins = []
    for stream in streams:
        keys = [noise_key(i // 20, i % 20, stream) for i in range(400)]
        uniforms = torch.exp(-torch.exp(-gumbel(torch.tensor(keys, dtype=torch.int32), 500).double()))
        bins.append((uniforms * 8).long().clamp(max=7))
    for first, second in combinations(bins, 2):
        assert p_value(count(first * 8 + second, 64), torch.full((64,), 1 / 64)) > 1e-7


def test_uniforms_are_uniform() -> None:
    """64 equal bins, within a key and over keys; chi-square, false alarm 1e-7 each."""
    keys = torch.tensor([noise_key(seed, 3, ACCEPTANCE) for seed in range(2000)], dtype=torch.int32)
    drawn = uniform(keys, 100)
    assert 0 < float(drawn.min()) < float(drawn.max()) < 1
    for some in (drawn, drawn[:, 0], drawn[:, 7]):
        assert p_value(count((some * 64).long(), 64), torch.full((64,), 1 / 64)) > 1e-7


def test_choices_have_seeds_of_their_own() -> None:
    assert choice_seed(1234, 0) == 1234
    seeds = {choice_seed(seed, index) for seed in (0, 1, 2, MAX_SEED) for index in range(100)}
    assert len(seeds) == 400
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_tokens_may_draw_by_other_ids() -> None:
    """A token's noise depends on its id, not on its index."""
    keys = torch.tensor([noise_key(3, position) for position in range(4)], dtype=torch.int32)
    whole = gumbel(keys, 100)
    assert torch.equal(gumbel(keys, torch.arange(100, dtype=torch.int32)), whole)
    other_ids = torch.tensor([99, 0, 7, 7], dtype=torch.int32)
    assert torch.equal(gumbel(keys, other_ids), whole[:, other_ids])
