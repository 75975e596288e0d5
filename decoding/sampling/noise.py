"""Counter-based Gumbel noise g(seed, position, token): the only source of randomness in Consort.

Target and drafter use the same seed and position, so they see the same noise, which couples their samples: Daliri,
Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978, section 3.
Rejection sampling needs other, independent streams of the same seed and position (docs/verification.md). The noise is
integer arithmetic up to two logarithms in float64, rounded to float32, so every device draws the same numbers.

The hash is the 32-bit two-round xorshift-multiply permutation of Chris Wellons' hash-prospector (constants
0x21f0aaad, 0x735a2d97), applied twice with two independent 32-bit keys derived from (seed, position).
"""

import torch
from torch import Tensor

from decoding.sampling.noise_keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, signed


def _mix_(x: Tensor) -> Tensor:
    """Apply the same permutation to int32 bit patterns, in place. Products wrap; masks make shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= MULTIPLIER_1
    x ^= (x >> 15) & 0x1FFFF
    x *= MULTIPLIER_2
    x ^= (x >> 15) & 0x1FFFF
    return x


def gumbel(keys: Tensor, tokens: int | Tensor) -> Tensor:
    """Return standard Gumbel noise for every token of the vocabulary.

    Args:
        keys: [N, 2] int32, one `noise_key` per row, on the device of the noise.
        tokens: V, for ids 0…V−1; or [V] or [N, V] integers, the ids whose noise is wanted.

    Returns:
        [N, V] float32, from −3.11 to 22.19.
    """
    exponential = uniform(keys, tokens).neg_().log1p_().neg_()
    return exponential.log_().neg_().float()


def uniform(keys: Tensor, counters: int | Tensor) -> Tensor:
    """Return uniform numbers in (0, 1), odd multiples of 2⁻³², [N, C] float64.

    Args:
        keys: [N, 2] int32
        counters: C, for 0…C−1; or [C] or [N, C] integers.
    """
    if isinstance(counters, int):
        counters = torch.arange(counters, dtype=torch.int32, device=keys.device)
    bits = _mix_(counters.int() * signed(GOLDEN) ^ keys[:, :1])  # [N, C]
    bits = _mix_(bits.add_(keys[:, 1:]))
    return ((bits >> 1) & 0x7FFFFFFF).double().add_(0.5).mul_(2.0**-31)
