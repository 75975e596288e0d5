"""Rates of acceptance: given the text, they average to what the papers say of any text."""

import pytest
import torch

from tests.training.distillation.chats import TOKENS, make_chats, make_model
from training.distillation.lessons import StudentVocabulary
from training.distillation.rates import LONGEST_DRAFT, Rates, given_text, held_out_rates
from training.drafter import DrafterStudent

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
Q = torch.tensor([0.1, 0.6, 0.1, 0.2])


def test_over_all_texts_they_are_the_known_acceptances() -> None:
    shared, rejection = given_text(P.expand(4, 4), Q.expand(4, 4), torch.eye(4, dtype=torch.bool))
    assert (P * rejection).sum().item() == pytest.approx(torch.minimum(P, Q).sum().item())
    ratios = torch.maximum(P[None] / P[:, None], Q[None] / Q[:, None]).sum(-1)
    assert (P * shared).sum().item() == pytest.approx((1 / ratios).sum().item())


def test_shared_noise_agrees_as_often_as_draws_do() -> None:
    """100,000 draws: a false alarm, at 6 standard deviations, has a probability below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    noise = -(-torch.rand(100_000, 4, generator=generator).clamp_min(1e-20).log()).log()
    teacher, student = (P.log() + noise).argmax(-1), (Q.log() + noise).argmax(-1)
    shared, _ = given_text(P.expand(4, 4), Q.expand(4, 4), torch.eye(4, dtype=torch.bool))
    for token in range(4):
        drawn = teacher == token
        agreed = (student[drawn] == token).float().mean().item()
        assert agreed == pytest.approx(shared[token].item(), abs=6 * 0.5 / int(drawn.sum()) ** 0.5)


def test_tokens_beyond_the_candidates_never_agree() -> None:
    is_drawn = torch.eye(4, dtype=torch.bool)[:1]
    known, _ = given_text(P[None, :2], Q[None, :2], is_drawn[:, :2])
    every, _ = given_text(P[None], Q[None], is_drawn)
    assert 0 < known.item() <= every.item()
    none = given_text(P[None], Q[None], torch.zeros(1, 4, dtype=torch.bool))
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
