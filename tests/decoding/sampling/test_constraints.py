"""Allowed and forced tokens, in mixed batches, against transformers' processors; bits of grammar masks."""

from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from decoding.sampling.constraints import AllowedTokens, ForcedTokens, GrammarMasks
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from tests.support.positions import SETTINGS, VOCAB, logits_of, tokens
from tests.support.properties import repeatable


def always(allowed: tuple[int, ...]) -> Callable[[int, Tensor], list[int]]:
    return lambda _, __: list(allowed)


@repeatable
@given(st.data(), st.lists(st.one_of(st.just(()), SETTINGS["allowed_token_ids"]), min_size=1, max_size=5))
def test_allowed_tokens(data: st.DataObject, values: list[tuple[int, ...]]) -> None:
    logits = data.draw(logits_of(len(values)))
    expected = logits.clone()
    for row, value in enumerate(values):
        if value:
            processor = PrefixConstrainedLogitsProcessor(always(value), 1)
            expected[row] = processor(torch.tensor([[0]]), logits[row : row + 1])
    params = [SamplingParams(max_tokens=9, allowed_token_ids=value) for value in values]
    step = AllowedTokens.build([Position(History(setting, [0], 1)) for setting in params], VOCAB, "cpu")
    if step:
        step.apply_(logits)
    assert torch.equal(logits, expected)


@repeatable
@given(st.data(), st.lists(st.tuples(*[st.one_of(st.none(), tokens)] * 2, st.integers(0, 3)), min_size=1, max_size=5))
def test_forced_tokens(data: st.DataObject, values: list[tuple[int | None, int | None, int]]) -> None:
    """The prompt has one token, as transformers' forced first token needs."""
    logits = data.draw(logits_of(len(values)))
    expected, positions = logits.clone(), []
    for row, (first, last, answered) in enumerate(values):
        params = SamplingParams(max_tokens=4, forced_bos_token_id=first, forced_eos_token_id=last)
        positions.append(Position(History(params, [0] * (answered // 2 + 1), 1), [0] * (answered - answered // 2)))
        ids = torch.zeros(1, 1 + answered, dtype=torch.int64)
        if first is not None:
            expected[row] = ForcedBOSTokenLogitsProcessor(first)(ids, expected[row : row + 1])
        if last is not None:
            expected[row] = ForcedEOSTokenLogitsProcessor(5, last)(ids, expected[row : row + 1])
    step = ForcedTokens.build(positions, VOCAB, "cpu")
    if step:
        step.apply_(logits)
    assert torch.equal(logits, expected)


@repeatable
@given(st.data(), st.lists(st.one_of(st.none(), st.sets(tokens)), min_size=1, max_size=5))
def test_grammar_masks(data: st.DataObject, sets: list[set[int] | None]) -> None:
    """The vocabulary takes two words of bits."""
    logits = data.draw(logits_of(len(sets), 40))
    params = SamplingParams(max_tokens=9)
    expected, positions = logits.clone(), []
    for row, allowed in enumerate(sets):
        words = None
        if allowed is not None:
            bits = [sum(1 << token for token in allowed), 1]
            words = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
            expected[row, [token for token in range(40) if token not in allowed | {32}]] = -torch.inf
        positions.append(Position(History(params, [0], 1), (), words))
    step = GrammarMasks.build(positions, "cpu")
    if step:
        step.apply_(logits)
    assert torch.equal(logits, expected)
