"""Rows sampled in tensors of fixed shapes get the same scores as in decoding/sampling/sampler.py."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.sampling.chain_sampler import ChainSampler, can_chain
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams, Structure
from decoding.sampling.processors import DISTRIBUTION
from decoding.sampling.sampler import SamplingBatch, rank
from tests.support.positions import SETTINGS, VOCAB, logits_of
from tests.support.properties import repeatable

FIELDS = [processor.field for processor in DISTRIBUTION]


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Draw greedy parameters, or any processors of the distribution."""
    chosen = draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=3))
    settings = {field: draw(SETTINGS[field]) for field in chosen}
    if draw(st.booleans()):
        settings["temperature"] = 0.0
    return SamplingParams(max_tokens=9, seed=draw(st.integers(0, 3)), **settings)


@repeatable
@given(st.data(), st.lists(parameters(), min_size=1, max_size=5), st.integers(0, 3))
def test_scores_are_those_of_the_sampler(data: st.DataObject, rows: list[SamplingParams], padding: int) -> None:
    """Three successive positions, with padding that changes nothing."""
    logits = data.draw(logits_of(len(rows) + padding))
    firsts = [5 + 3 * row for row in range(len(rows))]
    sampler = ChainSampler.of(rows, VOCAB)
    settings = sampler.settings(rows, len(logits))
    keys = sampler.keys(list(zip(rows, firsts, strict=True)), 3, len(logits))
    for step in range(3):
        positions = [
            Position(History(params, [0] * first, 0), [0] * step) for params, first in zip(rows, firsts, strict=True)
        ]
        expected = rank(logits[: len(rows)], SamplingBatch.build(positions, VOCAB), VOCAB)
        best = sampler.scores(logits, settings, keys[step])[: len(rows)].topk(VOCAB)
        assert torch.equal(best.values, expected[1])
        assert torch.equal(best.indices[:, 0], expected[0][:, 0])


def test_what_looks_at_the_text_cannot_be_sampled_ahead_of_it() -> None:
    assert can_chain(SamplingParams(max_tokens=1, temperature=0.5, top_k=4, top_p=0.5, min_p=0.1, stop=("x",)))
    for params in (
        SamplingParams(max_tokens=1, repetition_penalty=1.1),
        SamplingParams(max_tokens=1, min_tokens=1),
        SamplingParams(max_tokens=1, verification="rejection"),
        SamplingParams(max_tokens=1, structure=Structure(kind="regex", definition="a*")),
    ):
        assert not can_chain(params)


def test_alike_settings_need_one_recording() -> None:
    """The sampler is the same for any temperature, seed, or k within the bound."""
    kinds = {
        ChainSampler.of([SamplingParams(max_tokens=1, temperature=t, seed=int(10 * t), top_k=k)], 4096)
        for t, k in ((0.3, 40), (1.0, 50), (1.7, 3))
    }
    assert len(kinds) == 1
    assert ChainSampler.of([SamplingParams(max_tokens=1, temperature=0, top_k=9)], 4096).stages == ()
