"""Log-probabilities of tokens: the model's own, with ranks and alternatives, and no work for the garbage collector."""

import gc

import torch

from decoding.sampling.logprobs import token_logprobs


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
