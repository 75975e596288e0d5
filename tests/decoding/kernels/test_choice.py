"""The fused choice on CPUs gives the tokens and scores of the torch reference, to the bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.kernels.choice import choose_tokens
from decoding.kernels.native import library
from decoding.sampling import sampler
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

SETTINGS = {
    "temperature": (0.0, 0.001, 0.7, 1.0, 1.3, 100.0),
    "top_k": (0.0, 0.0, 1.0, 2.0, 5.0, 50.0, 1000.0, 1e6),
    "top_p": (1.0, 1.0, 1e-9, 0.3, 0.5, 0.9, 0.95, 0.999),
    "min_p": (0.0, 0.0, 0.01, 0.2, 0.5, 1.0),
}


class Cases:
    """Random rows and settings."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def logits(self, rows: int, vocab_size: int, kind: str) -> Tensor:
        scale = (0.1, 1.0, 3.0, 8.0)[self.integer(0, 4)]
        logits = torch.randn(rows, vocab_size, generator=self.generator) * scale
        match kind:
            case "coarse":
                logits = logits.round()
            case "equal":
                logits = torch.full_like(logits, 1.5)
            case "excluded":
                logits[torch.rand(rows, vocab_size, generator=self.generator) < 0.3] = -torch.inf
                logits[0] = -torch.inf
            case "few":  # as of a drafter that knows few tokens
                logits[torch.rand(rows, vocab_size, generator=self.generator) < 0.99] = -torch.inf
        return logits

    def settings(self, rows: int) -> Tensor:
        """Return settings of rows, [rows, 6]."""
        settings = torch.zeros(rows, 6, dtype=torch.float64)
        for column, values in enumerate(SETTINGS.values()):
            index = torch.randint(0, len(values), (rows,), generator=self.generator)
            settings[:, column] = torch.tensor(values, dtype=torch.float64)[index]
        settings[:, 4:] = torch.randint(-(2**31), 2**31, (rows, 2), generator=self.generator)
        return settings

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))


def reference(logits: Tensor, settings: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return sampler._best(sampler._scores(logits, SamplingBatch(settings)), count)


def assert_same(logits: Tensor, settings: Tensor) -> None:
    tokens, scores = choose_tokens(logits, settings, 3)
    expected_tokens, expected_scores = reference(logits, settings, 3)
    assert torch.equal(scores, expected_scores)
    assert torch.equal(tokens[:, 0], expected_tokens[:, 0])
    assert torch.equal(choose_tokens(logits, settings, 1)[0], expected_tokens[:, :1])


def test_some_tokens_are_chosen_from_as_if_all_others_were_impossible() -> None:
    cases = Cases(3)
    ids = torch.arange(0, 4000, 7)
    for _ in range(20):
        some, settings = cases.logits(8, len(ids), "normal"), cases.settings(8)
        every = torch.full((8, 4000), -torch.inf).index_copy(1, ids, some)
        expected_tokens, expected_scores = choose_tokens(every, settings, 3)
        columns, scores = choose_tokens(some, settings, 3, ids)
        possible = scores > -torch.inf
        assert torch.equal(scores, expected_scores)
        assert torch.equal(ids[columns][possible], expected_tokens[possible])
        batch = SamplingBatch(settings)
        assert torch.equal(sampler._best(sampler._scores(some, batch, ids), 3)[1], scores)


def assert_same_rounds(seed: int, rounds: int, rows: int, most: int) -> None:
    cases = Cases(seed)
    for _ in range(rounds):
        for kind in ("normal", "coarse", "equal", "excluded", "few"):
            assert_same(cases.logits(rows, cases.integer(3, most), kind), cases.settings(rows))


def test_equals_the_reference() -> None:
    assert_same_rounds(seed=0, rounds=25, rows=40, most=2000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_equals_the_reference_in_100_000_draws(seed: int) -> None:
    assert_same_rounds(seed, rounds=250, rows=100, most=600)


def test_equals_the_reference_in_a_large_vocabulary() -> None:
    cases = Cases(11)
    for scale in (1.0, 3.0):
        logits = torch.randn(12, 128_256, generator=cases.generator) * scale
        assert_same(logits, cases.settings(12))


def test_equals_the_reference_with_penalties_and_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    common: dict[str, Any] = {"max_tokens": 99, "temperature": 0.9, "top_p": 0.95}
    kinds = [
        SamplingParams(**common, seed=1, repetition_penalty=1.3, frequency_penalty=0.5),
        SamplingParams(**common, seed=2, presence_penalty=1.5, logit_bias=((3, 5.0),)),
        SamplingParams(**common, seed=3, allowed_token_ids=(1, 2, 3, 50)),
        SamplingParams(**common, seed=4, no_repeat_ngram_size=2, suppress_tokens=(7, 8)),
        SamplingParams(**common, seed=5),
    ]
    generator = torch.Generator().manual_seed(0)
    histories = [
        History(kind, torch.randint(0, 40, (length,), generator=generator).tolist(), length // 2)
        for length in range(20, 60)
        for kind in kinds
    ]
    words = torch.full((4,), 0x55555555, dtype=torch.int32)
    for masks in (None, words):  # without constraints, penalties act in place
        chosen = histories if masks is not None else [history for history in histories if history.params.seed in (1, 2)]
        positions = [
            Position(history, [9, 5, 9][:depth], masks if history.params.seed == 5 else None)
            for history in chosen
            for depth in range(4)
        ]
        logits = torch.randn(len(positions), 100, generator=generator) * 2
        kept = logits.clone()
        batch = SamplingBatch.build(positions, 100)
        fused = sampler.rank(logits, batch, 3)
        with monkeypatch.context() as patch:
            patch.setattr(sampler, "fused_choice", lambda device: None)
            expected = sampler.rank(logits, batch, 3)
        assert torch.equal(fused[1], expected[1])
        assert torch.equal(fused[0][:, 0], expected[0][:, 0])
        assert torch.equal(logits, kept)


def test_a_row_of_nan_gets_a_token() -> None:
    settings = torch.tensor([[0.0, 0, 1, 0, 1, 2], [1.0, 5, 0.9, 0.1, 1, 2]], dtype=torch.float64)
    tokens, scores = choose_tokens(torch.full((2, 100), torch.nan), settings, 1)
    assert ((tokens >= 0) & (tokens < 100)).all()
    assert not scores.isfinite().any()


def test_settings_live_during_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cases, native = Cases(3), library()
    assert native is not None
    logits, settings = cases.logits(64, 100, "normal"), cases.settings(64)
    taken: list[Tensor] = []

    def choose(*arguments: Any) -> None:
        taken.extend(torch.full_like(settings, torch.nan) for _ in range(8))  # overwrites memory that is free
        native.choose_tokens(*arguments)

    monkeypatch.setattr("decoding.kernels.choice.library", lambda: SimpleNamespace(choose_tokens=choose))
    expected = choose_tokens(logits, settings, 1)
    scattered = settings.T.contiguous().T
    for got, want in zip(choose_tokens(logits, scattered, 1), expected, strict=True):
        assert torch.equal(got, want)
