"""Counter-based Gumbel noise g(seed, position, token): the only source of randomness in Consort.

Target and drafter use the same seed and position, so they see the same noise, which couples their samples: Daliri,
Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978, section 3.
Rejection sampling needs other, independent streams of the same seed and position (docs/verification.md). The noise is
integer arithmetic up to two logarithms in float64, rounded to float32, so every device draws the same numbers.

The hash is the 32-bit two-round xorshift-multiply permutation of Chris Wellons' hash-prospector (constants
0x21f0aaad, 0x735a2d97), applied twice with two independent 32-bit keys derived from (seed, position).
"""

from functools import lru_cache

import numpy
import torch
from torch import Tensor

from decoding.sampling.params import MAX_SEED

OWN_TOKENS = 0  # the stream of the target's own samples, and of coupled drafters
ACCEPTANCE = 1  # the stream that decides on acceptance
_CHOICES = 2  # the stream of the seeds of several answers to one request
_FIRST_OF_DRAFTS = 3

_MULTIPLIER_1 = 0x21F0AAAD
_MULTIPLIER_2 = 0x735A2D97
_GOLDEN = 0x9E3779B9
_MASK_32 = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """Apply the 32-bit permutation to a Python integer in [0, 2**32)."""
    x ^= x >> 16
    x = (x * _MULTIPLIER_1) & _MASK_32
    x ^= x >> 15
    x = (x * _MULTIPLIER_2) & _MASK_32
    return x ^ (x >> 15)


def _mix_(x: Tensor) -> Tensor:
    """Apply the same permutation to int32 bit patterns, in place. Products wrap; masks make shifts logical."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLIER_1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLIER_2
    x ^= (x >> 15) & 0x1FFFF
    return x


def _signed(x: int) -> int:
    """Return the int32 with the bit pattern of x in [0, 2**32)."""
    return x - (1 << 32) if x >= (1 << 31) else x


def noise_key(seed: int, position: int, stream: int = OWN_TOKENS) -> tuple[int, int]:
    """Return two int32 keys for the noise of (seed, position, stream).

    seed in [0, 2**64), position in [0, 2**31), stream in [0, 2**32).
    """
    first, second = stream_key(seed, stream)
    return _signed(_mix_int(first ^ position)), _signed(_mix_int(second ^ position))


def noise_keys(stream_keys: numpy.ndarray, positions: numpy.ndarray) -> numpy.ndarray:
    """Return the `noise_key` of each row, [N, 2] int32.

    Args:
        stream_keys: [N, 2] uint32, one `stream_key` per row.
        positions: [N] uint32
    """
    x = stream_keys ^ positions[:, None]
    x ^= x >> 16
    x *= _MULTIPLIER_1
    x ^= x >> 15
    x *= _MULTIPLIER_2
    x ^= x >> 15
    keys: numpy.ndarray = x.view(numpy.int32)
    return keys


@lru_cache(maxsize=4096)
def stream_key(seed: int, stream: int = OWN_TOKENS) -> tuple[int, int]:
    """Return the part of the keys that depends on seed and stream alone; both in [0, 2**32)."""
    low, high = seed & _MASK_32, (seed >> 32) & _MASK_32
    first = _mix_int(_mix_int(low) ^ high)
    second = _mix_int(_mix_int(low ^ _GOLDEN) + high & _MASK_32)
    if stream:
        first = _mix_int(first ^ _mix_int(stream))
        second = _mix_int(second ^ _mix_int(stream ^ _GOLDEN))
    return first, second


def draft_stream(fence: int) -> int:
    """Return the stream of a drafter that last restarted after a rejection, when the text had `fence` tokens."""
    return _FIRST_OF_DRAFTS + fence


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of one of several answers to a request; the first has the request's. In [0, MAX_SEED]."""
    if index == 0:
        return seed
    high, low = noise_key(seed, index, _CHOICES)
    return ((high & _MASK_32) << 32 | (low & _MASK_32)) & MAX_SEED


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
    bits = _mix_(counters.int() * _signed(_GOLDEN) ^ keys[:, :1])  # [N, C]
    bits = _mix_(bits.add_(keys[:, 1:]))
    return ((bits >> 1) & 0x7FFFFFFF).double().add_(0.5).mul_(2.0**-31)
