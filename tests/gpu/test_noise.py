"""CPU and GPU draw the same numbers: integers exactly, their logarithms to the last bit or the one before."""

import pytest
import torch

from decoding.sampling.noise import gumbel, uniform
from decoding.sampling.noise_keys import noise_key

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def keys() -> torch.Tensor:
    seeds = (0, 1, 2**31, 2**32 - 1, 2**63 - 1)
    return torch.tensor(
        [noise_key(seed, position) for seed in seeds for position in (0, 7, 2**31 - 1)], dtype=torch.int32
    )


def test_uniforms_are_equal() -> None:
    assert torch.equal(uniform(keys().cuda(), 4096).cpu(), uniform(keys(), 4096))


def test_gumbel_noise_is_equal_up_to_the_logarithm() -> None:
    torch.testing.assert_close(gumbel(keys().cuda(), 4096).cpu(), gumbel(keys(), 4096), rtol=1e-5, atol=2e-6)
