"""Every processor equals transformers' processor of the same name, row by row."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decoding.sampling.params import SamplingParams
from decoding.sampling.processors import COMMON, RARE, Stage, _reduced, log_add
from tests.support.positions import SETTINGS, logits_of
from tests.support.properties import repeatable

THEIRS: dict[str, Callable[[Any], LogitsProcessor]] = {
    "temperature": TemperatureLogitsWarper,
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
    "eta_cutoff": EtaLogitsWarper,
}
OFF = {field: getattr(SamplingParams(max_tokens=1), field) for field in THEIRS} | {"temperature": 0.0}


def assert_same(field: str, logits: Tensor, values: Sequence[float]) -> None:
    """Compare our processor on all rows with transformers' on each row."""
    settings = [(row, value) for row, value in enumerate(values) if value != OFF[field]]
    expected = logits.clone()
    for row, value in settings:
        expected[row] = THEIRS[field](value)(None, logits[row : row + 1])
    kept = logits.clone()
    if field in COMMON:
        ours = COMMON[field](logits, torch.tensor(values, dtype=torch.float64))
        if field == "top_p":  # which of several equal logits stay depends on transformers' unstable sort
            ours, expected = ours.sort().values, expected.sort().values
        assert torch.equal(ours, expected)
    elif settings:
        assert torch.equal(Stage.build(RARE[field], settings, "cpu")(logits), expected)
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("field", THEIRS)
def test_equals_transformers(field: str) -> None:
    values = st.one_of(SETTINGS[field], st.just(OFF[field]))

    @repeatable
    @given(st.data(), st.lists(values, min_size=1, max_size=5), st.integers(2, 40))
    def same(data: st.DataObject, values: list[float], vocab_size: int) -> None:
        assert_same(field, data.draw(logits_of(len(values), vocab_size)), values)

    same()


@pytest.mark.parametrize("function", [torch.sum, torch.nansum, torch.logsumexp])
def test_sums_of_a_row_have_the_same_bits_alone_and_among_others(function: Callable[..., Tensor]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which share the sums of a long row that is alone
    try:
        for seed in range(50):
            rows = torch.randn(3, 49152, generator=torch.Generator().manual_seed(seed)) * 4
            assert torch.equal(_reduced(function, rows[:1]), _reduced(function, rows)[:1])
    finally:
        torch.set_num_threads(threads)


def test_all_processors_of_the_distribution_are_here() -> None:
    assert [*COMMON, *RARE] == list(THEIRS)


@pytest.mark.parametrize("k", range(1, 12))
def test_top_p_of_equal_logits_is_exact(k: int) -> None:
    """Where sums of probabilities equal p, transformers' rounding may keep one more token."""
    kept = COMMON["top_p"](torch.zeros(1, 12), torch.tensor([k / 12])) == 0
    assert kept[0].tolist() == [False] * (12 - k) + [True] * k


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
