"""Losses at a few candidates, against numbers computed by hand."""

import math

import pytest
import torch
from torch import Tensor

from training.distillation.rates import (
    LOSS_NAMES,
    LOSSES,
    LossName,
    acceptance,
    student_logprobs,
    teacher_probabilities,
)

P = torch.tensor([[0.5, 0.25], [1.0, 0.0]])  # the first teacher has a quarter elsewhere
Q = torch.tensor([[0.25, 0.25], [0.5, 0.25]])


def test_acceptance_is_what_both_share() -> None:
    assert acceptance(Q.log(), P).tolist() == pytest.approx([0.5, 0.5])


def test_kl_counts_the_teachers_candidates() -> None:
    first = 0.5 * math.log(0.5 / 0.75 / 0.25) + 0.25 * math.log(0.25 / 0.75 / 0.25)
    second = math.log(1 / 0.5)
    assert LOSSES["kl"](Q.log(), P).item() == pytest.approx((first + second) / 2)


def test_reverse_kl_takes_other_tokens_as_one() -> None:
    p = P.clamp_min(1e-6)
    first = 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.25) + 0.5 * math.log(0.5 / 0.25)
    second = 0.5 * math.log(0.5) + 0.25 * math.log(0.25 / p[1, 1].item()) + 0.25 * math.log(0.25 / 1e-6)
    assert LOSSES["reverse_kl"](Q.log(), P).item() == pytest.approx((first + second) / 2, rel=1e-5)


def test_tv_is_one_minus_acceptance() -> None:
    assert LOSSES["tv"](Q.log(), P).item() == pytest.approx(0.5)


def test_lk_mixes_by_acceptance() -> None:
    weight = math.exp(-1.5)
    mixed = weight * LOSSES["kl"](Q.log(), P).item() + (1 - weight) * 0.5
    assert LOSSES["lk"](Q.log(), P).item() == pytest.approx(mixed)


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_pulls_the_student_to_its_teacher(name: LossName) -> None:
    logprobs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    p, rows = teacher_probabilities(logprobs, 1.0), torch.arange(8).expand(16, 8)
    logits = torch.zeros(16, 8, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.02)

    def accepted() -> float:
        return acceptance(student_logprobs(logits.detach(), rows, 1.0), p).mean().item()

    before = accepted()
    for _ in range(200):
        optimizer.zero_grad()
        LOSSES[name](student_logprobs(logits, rows, 1.0), p).backward()
        optimizer.step()
    assert before < 0.8
    assert accepted() > 0.95


def test_student_logprobs_are_those_of_the_softmax() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([[0, 6], [1, 1], [5, 2]])
    expected = (logits / 0.7).log_softmax(-1).gather(-1, rows)
    torch.testing.assert_close(student_logprobs(logits, rows, 0.7), expected)


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.6, 0.3]), (0.5, [0.8, 0.2])])
def test_the_teacher_follows_the_temperature(temperature: float, expected: list[float]) -> None:
    p: Tensor = teacher_probabilities(torch.tensor([[0.6, 0.3]]).log(), temperature)
    assert p[0].tolist() == pytest.approx(expected)
