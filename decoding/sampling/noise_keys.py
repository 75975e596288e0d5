"""The keys of the noise: which seed, position and stream a row's numbers come from; see noise.py beside it."""

from functools import lru_cache

import numpy

from decoding.sampling.params import MAX_SEED

OWN_TOKENS = 0  # the stream of the target's own samples, and of coupled drafters
ACCEPTANCE = 1  # the stream that decides on acceptance
_CHOICES = 2  # the stream of the seeds of several answers to one request
_FIRST_OF_DRAFTS = 3

MULTIPLIER_1 = 0x21F0AAAD
MULTIPLIER_2 = 0x735A2D97
GOLDEN = 0x9E3779B9
_MASK_32 = 0xFFFFFFFF


def _mix_int(x: int) -> int:
    """Apply the 32-bit permutation to a Python integer in [0, 2**32)."""
    x ^= x >> 16
    x = (x * MULTIPLIER_1) & _MASK_32
    x ^= x >> 15
    x = (x * MULTIPLIER_2) & _MASK_32
    return x ^ (x >> 15)


def signed(x: int) -> int:
    """Return the int32 with the bit pattern of x in [0, 2**32)."""
    return x - (1 << 32) if x >= (1 << 31) else x


def noise_key(seed: int, position: int, stream: int = OWN_TOKENS) -> tuple[int, int]:
    """Return two int32 keys for the noise of (seed, position, stream).

    seed in [0, 2**64), position in [0, 2**31), stream in [0, 2**32).
    """
    first, second = stream_key(seed, stream)
    return signed(_mix_int(first ^ position)), signed(_mix_int(second ^ position))


def noise_keys(stream_keys: numpy.ndarray, positions: numpy.ndarray) -> numpy.ndarray:
    """Return the `noise_key` of each row, [N, 2] int32.

    Args:
        stream_keys: [N, 2] uint32, one `stream_key` per row.
        positions: [N] uint32
    """
    x = stream_keys ^ positions[:, None]
    x ^= x >> 16
    x *= MULTIPLIER_1
    x ^= x >> 15
    x *= MULTIPLIER_2
    x ^= x >> 15
    keys: numpy.ndarray = x.view(numpy.int32)
    return keys


@lru_cache(maxsize=4096)
def stream_key(seed: int, stream: int = OWN_TOKENS) -> tuple[int, int]:
    """Return the part of the keys that depends on seed and stream alone; both in [0, 2**32)."""
    low, high = seed & _MASK_32, (seed >> 32) & _MASK_32
    first = _mix_int(_mix_int(low) ^ high)
    second = _mix_int(_mix_int(low ^ GOLDEN) + high & _MASK_32)
    if stream:
        first = _mix_int(first ^ _mix_int(stream))
        second = _mix_int(second ^ _mix_int(stream ^ GOLDEN))
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
