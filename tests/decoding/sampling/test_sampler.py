"""The sampler draws from the softmax of the processed logits. Coupled verification does not change that."""

import gc
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from decoding.drafts.draft import Draft
from decoding.drafts.verification import accepted_path
from decoding.sampling import sampler
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import NO_TOKEN, process, rank, reason_for_no_token, sample, token_logprobs
from tests.support.chi_square import count, p_value

DRAWS = 200_000
V = 4


def sampled_params(seed: int = 0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def position_at(params: SamplingParams, index: int) -> Position:
    """Return a position whose text is all zeros."""
    return Position(History(params, [0] * index, 0))


def random_logits(*shape: int, seed: int, scale: float = 1.5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (0.9, 6, 0.85)],
)
@pytest.mark.slow
def test_draws_follow_the_processed_distribution(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over 10 tokens against transformers' processors; false alarm 1e-7."""
    logits = random_logits(1, 10, seed=1)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(torch.LongTensor(1, 0), logits).softmax(-1)[0]
    settings = [sampled_params(seed, temperature, top_k, top_p) for seed in range(DRAWS // 500)]
    texts = [[0] * length for length in range(500)]
    positions = [Position(History(params, text, 0)) for params in settings for text in texts]
    drawn = sample(logits.expand(DRAWS, -1), SamplingBatch.build(positions, 10))
    assert p_value(count(drawn, 10), expected) > 1e-7


def test_greedy_is_argmax_in_any_float_type() -> None:
    greedy = SamplingParams(max_tokens=1, temperature=0, top_k=3, top_p=0.5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = random_logits(50, 100, seed=2).to(dtype)
        drawn = sample(logits, SamplingBatch.build([position_at(greedy, i) for i in range(50)], 100))
        assert torch.equal(drawn, logits.argmax(-1))


def test_the_best_ranked_is_the_sample_and_the_next_what_it_would_be_without() -> None:
    settings = [SamplingParams(max_tokens=1, temperature=0), sampled_params(1), sampled_params(2, 0.7)] * 30
    for part in (settings, settings[::3], settings[1::3]):
        batch = SamplingBatch.build([position_at(params, i) for i, params in enumerate(part)], 100)
        logits = random_logits(len(part), 100, seed=3)
        tokens, scores = rank(logits, batch, 3)
        assert torch.equal(scores, scores.sort(descending=True).values)
        for column in tokens.unbind(dim=1):
            assert torch.equal(column, sample(logits, batch))
            logits = logits.scatter(1, column[:, None], -1e9)
    _, scores = rank(
        random_logits(1, 100, seed=3), SamplingBatch.build([position_at(sampled_params(1, top_k=2), 0)], 100), 3
    )
    assert scores[0].isinf().tolist() == [False, False, True]


def test_a_mixed_batch_gives_each_row_what_it_gets_alone() -> None:
    settings = [
        SamplingParams(max_tokens=1, temperature=0),
        sampled_params(1),
        sampled_params(2, 0.7),
        sampled_params(3, 1.0, 7),
        sampled_params(4, 1.2, 0, 0.8),
        sampled_params(5, 0.9, 7, 0.8),
    ]
    positions = [position_at(settings[i * i % 6], 31 * i) for i in range(120)]
    logits = random_logits(120, 50, seed=3)
    kept = logits.clone()
    together = sample(logits, SamplingBatch.build(positions, 50))
    alone = [
        sample(row[None], SamplingBatch.build([position], 50)) for row, position in zip(logits, positions, strict=True)
    ]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(logits, kept)
    processed = process(logits, SamplingBatch.build(positions, 50))
    assert processed.shape == logits.shape


@cache
def settings_of_draws() -> list[SamplingParams]:
    """Return the parameters of DRAWS texts; the i-th has seed i."""
    return [sampled_params(i) for i in range(DRAWS)]


@cache
def batch_at(position: int) -> SamplingBatch:
    """Return the batch of one position of these texts."""
    return SamplingBatch.build([position_at(params, position) for params in settings_of_draws()], V)


class Chain:
    """A model whose next token depends on the last one alone: logits [V, V], a row per last token."""

    def __init__(self, seed: int, *, scale: float = 1.5) -> None:
        self.logits = random_logits(V, V, seed=seed, scale=scale)
        self.probs = self.logits.softmax(-1)

    def next(self, last: Tensor, position: int) -> Tensor:
        """Sample a token for each text. last: [DRAWS]; returns [DRAWS]."""
        return sample(self.logits[last], batch_at(position))


def speculate(target: Chain, drafter: Chain, texts: Tensor, draft_length: int) -> tuple[Tensor, Tensor]:
    """Take one step after the last tokens. Returns the target's tokens [DRAWS, K + 1] and accepted lengths [DRAWS]."""
    path, chosen = [texts], []
    for position in range(draft_length + 1):
        chosen.append(target.next(path[-1], position))
        path.append(drafter.next(path[-1], position))
    sampled, drafts = torch.stack(chosen, dim=1), torch.stack(path[1:-1], dim=1)
    chain = list(range(-1, draft_length - 1))
    paths = (
        accepted_path(row, Draft(draft, chain))[0] for row, draft in zip(sampled.tolist(), drafts.tolist(), strict=True)
    )
    return sampled, torch.tensor([len(path) for path in paths])


@pytest.mark.slow
def test_committed_tokens_follow_the_target() -> None:
    """Chi-square at the first position, after acceptance, at the bonus, after a rejection; false alarm 7e-7."""
    target, drafter = Chain(4, scale=1.0), Chain(5, scale=1.0)
    start = torch.zeros(DRAWS, dtype=torch.int64)
    sampled, accepted = speculate(target, drafter, start, draft_length=2)
    assert all(int((accepted == n).sum()) > 5_000 for n in range(3))

    assert p_value(count(sampled[:, 0], V), target.probs[0]) > 5e-8
    assert least_p_value(target, sampled[accepted >= 1, 0], sampled[accepted >= 1, 1]) > 5e-8
    assert least_p_value(target, sampled[accepted == 2, 1], sampled[accepted == 2, 2]) > 5e-8

    after = target.next(sampled[:, 0], 1)  # the next step of the rejected rows
    rejected = accepted == 0
    assert least_p_value(target, sampled[rejected, 0], after[rejected]) > 5e-8


def least_p_value(target: Chain, before: Tensor, after: Tensor) -> float:
    """Return the least p-value of the tokens after each first token; rare first tokens are left out."""
    chosen = [after[before == token] for token in range(V)]
    return min(p_value(count(c, V), target.probs[i]) for i, c in enumerate(chosen) if len(c) > 2_000)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_acceptance_is_at_least_the_coupling_bound(seed: int) -> None:
    """(1 - TV) / (1 + TV), Daliri et al., and at most the optimum 1 - TV; Hoeffding, false alarm 1e-7 per side."""
    target, drafter = Chain(10 + seed), Chain(20 + seed, scale=0.3 * (seed + 1))
    start = torch.full((DRAWS,), seed % V)
    _, accepted = speculate(target, drafter, start, draft_length=1)
    rate = float(accepted.double().mean())
    distance = float((target.probs[seed % V] - drafter.probs[seed % V]).abs().sum() / 2)
    slack = math.sqrt(math.log(1e7) / (2 * DRAWS))
    assert (1 - distance) / (1 + distance) - slack <= rate <= 1 - distance + slack


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("more", [{}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.01}, {"typical_p": 0.9}])
def test_no_token_is_chosen_from_what_is_no_number(
    is_fused: bool, temperature: float, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_fused:
        monkeypatch.setattr(sampler, "fused_choice", lambda device: None)
    logits = random_logits(6, 300, seed=5)
    logits[0], logits[1, 200], logits[2, 3], logits[3] = math.nan, math.nan, math.inf, -math.inf
    logits[4, 5:] = -math.inf
    position = position_at(SamplingParams(max_tokens=1, temperature=temperature, **more), 3)
    tokens = sample(logits, SamplingBatch.build([position] * 6, 300)).tolist()
    assert tokens[:4] == [NO_TOKEN] * 4
    assert 0 <= tokens[4] < 5
    assert 0 <= tokens[5] < 300
    problems = [reason_for_no_token(row) for row in logits]
    assert [reason.split()[-1] for reason in problems[:4]] == ["NaN", "NaN", "infinite", "infinity"]


def test_they_are_those_of_the_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, [2, 0], [2, 0])
    expected = logits.double().softmax(dim=-1).log()
    assert abs(first.logprob - expected[0, 2]) < 1e-6
    assert abs(second.logprob - expected[1, 0]) < 1e-6
    assert (first.rank, second.rank) == (2, 1)
    assert [token for token, _ in first.top] == [1, 2]
    assert second.top == ()


def test_the_garbage_collector_does_not_look_through_those_of_a_long_prompt() -> None:
    """It held a loop for 0.2 s after 128,000 tokens."""
    assert not any(map(gc.is_tracked, token_logprobs(torch.zeros(3, 4), [0, 1, 2], [1, 1, 1])))
