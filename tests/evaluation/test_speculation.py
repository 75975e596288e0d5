"""Upper bounds of the speed-up, and measured steps: more tokens never take less time, whatever a noisy machine says."""

from pathlib import Path

import pytest
import torch

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from evaluation import speculation
from evaluation.speculation import (
    SpeculationLimits,
    accepted_lengths,
    agreement,
    never_falling,
    time_heads,
    time_steps,
    tokens_per_step,
)
from tests.support.mtp import make_mtp


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


def test_times_that_rise_stay_as_they_are() -> None:
    times = {(1, 1): 1.0, (1, 2): 1.5, (4, 1): 0.5, (4, 3): 0.5}
    assert never_falling(times) == times


def test_neighbours_in_the_wrong_order_become_their_mean() -> None:
    times = {(1, 5): 3.0, (1, 1): 9.0, (1, 2): 3.0, (1, 3): 2.0, (4, 1): 7.0}
    fitted = never_falling(times)
    assert fitted == {(1, 5): 4.25, (1, 1): 4.25, (1, 2): 4.25, (1, 3): 4.25, (4, 1): 7.0}
    assert list(fitted) == list(times)


def test_no_speed_up_exceeds_the_tokens_of_a_step() -> None:
    fitted = never_falling({(1, 1): 0.08, (1, 5): 0.01})  # a hiccup while plain steps were timed
    limits = SpeculationLimits(4, fitted[1, 1], fitted[1, 5], draft_step_s=0.0, tokens_per_step=1.76)
    assert limits.hidden == pytest.approx(1.76)


def test_steps_and_drafts_of_a_model_with_states_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_TIMING_S", 0.0)
    make_mtp("qwen3_5", tmp_path)
    spec = ModelSpec(name="m", path=str(tmp_path), device="cpu", slots=2, max_length=200, threads=1)
    runner, _, heads = load_with_heads(spec, HeadsSpec(name="h", path=str(tmp_path), kind="mtp", min_acceptance=0))
    steps = time_steps(runner, [(1, 1), (2, 17)], SamplingParams(max_tokens=1))
    assert min(steps.seconds.values()) > 0
    assert time_heads(heads, runner, 2, 4)[1] >= 0
