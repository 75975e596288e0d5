"""Logarithms of sums have the same bits wherever a number stands."""

import torch

from decoding.kernels.log_add import log_add


def test_it_equals_torchs() -> None:
    first, second = torch.randn(2, 7, 50, generator=torch.Generator().manual_seed(1)) * 8
    first[0, :9] = second[0, 4:12] = -torch.inf
    torch.testing.assert_close(log_add(first, second), torch.logaddexp(first, second), rtol=1e-6, atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    """Where rows end in the middle of a vector."""
    first, second = torch.randn(2, 40, 1001, generator=torch.Generator().manual_seed(2)) * 3 - 4
    among = log_add(first, second)
    for row in range(40):
        assert torch.equal(log_add(first[row].clone(), second[row].clone()), among[row])
