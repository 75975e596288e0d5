"""Every processor equals transformers' processor of the same name, row by row."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding import processors
from tests.support.properties import repeatable

Settings = Sequence[float]


@st.composite
def logits_of(draw: st.DrawFn, rows: int) -> Tensor:
    """[rows, V]: normal, or coarse so that there are ties, or with tokens that are excluded already."""
    vocab_size = draw(st.integers(2, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, vocab_size, generator=generator) * draw(st.sampled_from([0.1, 1.0, 8.0]))
    match draw(st.sampled_from(["normal", "coarse", "equal", "excluded"])):
        case "coarse":
            logits = logits.round()
        case "equal":
            logits = torch.full_like(logits, 1.5)
        case "excluded":
            logits[:, 1:].masked_fill_(torch.rand(rows, vocab_size - 1, generator=generator) < 0.3, float("-inf"))
    return logits


def by_row(logits: Tensor, values: Settings, warp: Callable[[Tensor, float], Tensor]) -> Tensor:
    """What transformers makes of each row with its own setting."""
    return torch.cat([warp(row[None], value) for row, value in zip(logits, values, strict=True)])


@repeatable
@given(st.data(), st.lists(st.sampled_from([1.0, 0.001, 0.7, 1.3, 100.0]), min_size=1, max_size=5))
def test_temperature(data: st.DataObject, values: Settings) -> None:
    logits = data.draw(logits_of(len(values)))
    expected = by_row(logits, values, lambda row, value: TemperatureLogitsWarper(value)(None, row))
    kept = logits.clone()
    torch.testing.assert_close(processors.temperature(logits, torch.tensor(values)), expected)
    assert torch.equal(logits, kept)


@repeatable
@given(st.data(), st.lists(st.sampled_from([0, 1, 2, 5, 39, 50]), min_size=1, max_size=5))
def test_top_k(data: st.DataObject, values: list[int]) -> None:
    logits = data.draw(logits_of(len(values)))
    expected = by_row(logits, values, lambda row, value: TopKLogitsWarper(int(value))(None, row) if value else row)
    kept = logits.clone()
    assert torch.equal(processors.top_k(logits, torch.tensor(values)), expected)
    assert torch.equal(logits, kept)


@repeatable
@given(st.data(), st.lists(st.sampled_from([1.0, 1e-9, 0.001, 0.3, 0.5, 0.8, 0.9, 0.95]), min_size=1, max_size=5))
def test_top_p(data: st.DataObject, values: Settings) -> None:
    logits = data.draw(logits_of(len(values)))
    expected = by_row(logits, values, lambda row, value: TopPLogitsWarper(value)(None, row) if value < 1 else row)
    kept = logits.clone()
    assert torch.equal(processors.top_p(logits, torch.tensor(values, dtype=torch.float64)), expected)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("k", range(1, 12))
def test_top_p_of_equal_logits_keeps_what_transformers_keeps(k: int) -> None:
    """Where the cumulative probability meets the threshold exactly, rounding decides."""
    logits = torch.zeros(1, 12)
    value = k / 12
    expected = TopPLogitsWarper(value)(None, logits)
    assert torch.equal(processors.top_p(logits, torch.tensor([value], dtype=torch.float64)), expected)
