"""Counter-based Gumbel noise g(seed, position, token): the one source of randomness in Consort.

Target and drafter call it with the same seed and position and so see the same noise, which couples their samples
(Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant speculative decoding", arXiv 2408.07978,
section 3). It knows nothing of requests, batches or devices: integer arithmetic up to the last logarithm, so every
device draws the same numbers.

The hash is the 32-bit two-round xorshift-multiply permutation of Chris Wellons' hash-prospector (constants
0x21f0aaad, 0x735a2d97), applied twice with two independent 32-bit keys derived from (seed, position).
"""

import torch
from torch import Tensor

_MULTIPLIER_1 = 0x21F0AAAD
_MULTIPLIER_2 = 0x735A2D97
_GOLDEN = 0x9E3779B9
_MASK_32 = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """The 32-bit permutation on a Python integer in [0, 2**32)."""
    x ^= x >> 16
    x = (x * _MULTIPLIER_1) & _MASK_32
    x ^= x >> 15
    x = (x * _MULTIPLIER_2) & _MASK_32
    return x ^ (x >> 15)


def _mix_(x: Tensor) -> Tensor:
    """The same permutation on int32 bit patterns, in place. Products wrap; shifts are made logical by masks."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MULTIPLIER_1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MULTIPLIER_2
    x ^= (x >> 15) & 0x1FFFF
    return x


def _signed(x: int) -> int:
    """The int32 that has the bit pattern of x in [0, 2**32)."""
    return x - (1 << 32) if x >= (1 << 31) else x


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Two int32 keys for the noise of one (seed, position): seed in [0, 2**64), position in [0, 2**31)."""
    low, high = seed & _MASK_32, (seed >> 32) & _MASK_32
    first = _mix_int(_mix_int(_mix_int(low) ^ high) ^ position)
    second = _mix_int(_mix_int(_mix_int(low ^ _GOLDEN) + high & _MASK_32) ^ position)
    return _signed(first), _signed(second)


def gumbel(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    Args:
        keys: [N, 2] int32, one `noise_key` per row, on the device where the noise is wanted.
        vocab_size: V.

    Returns:
        [N, V] float32. All values are finite; the upper tail, which decides samples, has full float precision
        (uniforms near zero enter through log1p), the lower tail ends at −2.8.
    """
    tokens = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = _mix_(tokens * _signed(_GOLDEN) ^ keys[:, :1])  # [N, V]
    bits = _mix_(bits.add_(keys[:, 1:]))
    uniform = ((bits >> 1) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)  # (0, 1]
    exponential = uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()
