"""Attribution of tokens to members, against explicit sums of probabilities."""

import math

import pytest
import torch

from decoding.blending.attribution import attribute_tokens

LOGITS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]]).log()  # [M, V]


def test_shares_of_a_mixture_are_posterior_probabilities_of_the_members() -> None:
    contributions = attribute_tokens(LOGITS[:, None].expand(2, 3, 3), [0, 1, 2], [0.75, 0.25])
    for token, views in enumerate(contributions):
        probabilities = [float(LOGITS[member, token].exp()) for member in range(2)]
        total = 0.75 * probabilities[0] + 0.25 * probabilities[1]
        assert [math.exp(logprob) for logprob, _, _ in views] == pytest.approx(probabilities)
        assert [share for _, _, share in views] == pytest.approx(
            [0.75 * probabilities[0] / total, 0.25 * probabilities[1] / total]
        )
    assert [[agreed for _, agreed, _ in views] for views in contributions] == [
        [True, False],
        [False, True],
        [False, False],
    ]


def test_members_that_rule_a_token_out_or_do_not_count_have_no_share() -> None:
    logits = torch.tensor([[[0.0, -math.inf]], [[0.0, 0.0]], [[0.0, 0.0]]])
    assert [share for _, _, share in attribute_tokens(logits, [1], [0.5, 0.0, 0.5])[0]] == [0, 0, 1]
    assert [share for _, _, share in attribute_tokens(logits[:1], [1], [1.0])[0]] == [0]
