"""Losses and rates of acceptance, against numbers computed by hand and what the papers say of any text."""

import math

import pytest
import torch
from torch import Tensor

from tests.training.distillation.chats import TOKENS, make_chats, make_model
from training.distillation.lessons import StudentVocabulary
from training.distillation.rates import (
    LONGEST_DRAFT,
    LOSS_NAMES,
    LOSSES,
    LossName,
    Rates,
    acceptance,
    given_text,
    held_out_rates,
    student_logprobs,
    teacher_probabilities,
)
from training.drafter import DrafterStudent

P = torch.tensor([[0.5, 0.25], [1.0, 0.0]])  # the first teacher has a quarter elsewhere
Q = torch.tensor([[0.25, 0.25], [0.5, 0.25]])
TEACHER = torch.tensor([0.5, 0.3, 0.15, 0.05])
STUDENT = torch.tensor([0.1, 0.6, 0.1, 0.2])


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


def test_over_all_texts_they_are_the_known_acceptances() -> None:
    shared, rejection = given_text(TEACHER.expand(4, 4), STUDENT.expand(4, 4), torch.eye(4, dtype=torch.bool))
    assert (TEACHER * rejection).sum().item() == pytest.approx(torch.minimum(TEACHER, STUDENT).sum().item())
    ratios = torch.maximum(TEACHER[None] / TEACHER[:, None], STUDENT[None] / STUDENT[:, None]).sum(-1)
    assert (TEACHER * shared).sum().item() == pytest.approx((1 / ratios).sum().item())


def test_shared_noise_agrees_as_often_as_draws_do() -> None:
    """100,000 draws: a false alarm, at 6 standard deviations, has a probability below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    noise = -(-torch.rand(100_000, 4, generator=generator).clamp_min(1e-20).log()).log()
    teacher, student = (TEACHER.log() + noise).argmax(-1), (STUDENT.log() + noise).argmax(-1)
    shared, _ = given_text(TEACHER.expand(4, 4), STUDENT.expand(4, 4), torch.eye(4, dtype=torch.bool))
    for token in range(4):
        drawn = teacher == token
        agreed = (student[drawn] == token).float().mean().item()
        assert agreed == pytest.approx(shared[token].item(), abs=6 * 0.5 / int(drawn.sum()) ** 0.5)


def test_tokens_beyond_the_candidates_never_agree() -> None:
    is_drawn = torch.eye(4, dtype=torch.bool)[:1]
    known, _ = given_text(TEACHER[None, :2], STUDENT[None, :2], is_drawn[:, :2])
    every, _ = given_text(TEACHER[None], STUDENT[None], is_drawn)
    assert 0 < known.item() <= every.item()
    none = given_text(TEACHER[None], STUDENT[None], torch.zeros(1, 4, dtype=torch.bool))
    assert [part.item() for part in none] == [0.0, 0.0]


def test_lengths_add_up_the_rates() -> None:
    rates = Rates(0.7, 9, 0.5, shared_noise=[0.5, 0.25], rejection=[0.75, 0.5])
    assert rates.lengths == {"shared_noise": [1.5, 1.75], "rejection": [1.75, 2.25]}


def test_rates_are_measured_by_temperature_and_fall_along_the_draft() -> None:
    vocabulary = StudentVocabulary(torch.arange(TOKENS), TOKENS)
    measured = held_out_rates(DrafterStudent(make_model(), vocabulary), make_chats(30), tokens=64, longest=64)
    assert [rates.temperature for rates in measured] == [0.0, 0.7, 1.0]
    assert sum(rates.positions for rates in measured) == sum(len(chat.tokens) for chat in make_chats(30))
    for rates in measured:
        for kind in (rates.shared_noise, rates.rejection):
            assert len(kind) == LONGEST_DRAFT
            assert kind == sorted(kind, reverse=True)
    assert measured[0].shared_noise == measured[0].rejection
