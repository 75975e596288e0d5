"""Upper bounds of the speed-up."""

import pytest
import torch

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from evaluation.limits import SpeculationLimits, accepted_lengths, agreement, tokens_per_step


def test_speed_ups_follow_the_formulas() -> None:
    limits = SpeculationLimits(4, plain_step_s=1.0, verify_step_s=1.25, draft_step_s=0.25, tokens_per_step=3.0)
    assert limits.hidden == pytest.approx(3 / 1.25)
    assert limits.alternating == pytest.approx(3 / 2.25)
    slow_drafter = SpeculationLimits(4, plain_step_s=1.0, verify_step_s=1.25, draft_step_s=0.5, tokens_per_step=3.0)
    assert slow_drafter.hidden == pytest.approx(3 / 2)


def test_tokens_per_step_walks_along_the_answer() -> None:
    agrees = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    # Two accepted and one recovered; one and one; two and the bonus token.
    assert tokens_per_step([accepted_lengths(agrees)], 2) == pytest.approx((3 + 2 + 3) / 3)
    assert tokens_per_step([accepted_lengths(torch.ones(9))], 3) == 4
    assert tokens_per_step([accepted_lengths(torch.zeros(9))], 3) == 1


def test_accepted_lengths_end_at_the_first_difference() -> None:
    assert accepted_lengths(torch.tensor([1, 1, 0, 1, 0, 0, 1])).tolist() == [2, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_agrees_with_what_it_sampled_itself(temperature: float) -> None:
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=5)
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    history = History(params, list(range(7)), 7)
    positions = [Position(history, [0] * i) for i in range(20)]
    answer = sample(logits, SamplingBatch.build(positions, 50)).tolist()
    assert agreement(logits, history, answer).all()
    answer[3] = (answer[3] + 1) % 50
    assert agreement(logits, history, answer).tolist() == [i != 3 for i in range(20)]
