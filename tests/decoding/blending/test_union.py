"""Candidates, the tokens below them, and members without logits, by hand."""

import math

import pytest
import torch

from decoding.blending.union import keep_candidates, rank_others_below, replace_empty, top_k_union

INF = math.inf
OWN = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]])


def test_candidates_are_the_best_of_each() -> None:
    union = top_k_union(OWN, 2, [[[4], [0, 4]], [[], [1]]])
    assert union.tolist() == [[True, True, False, False, True], [True, True, False, True, True]]
    assert top_k_union(OWN, 9, []).all()
    assert keep_candidates(OWN, union)[0].tolist() == [4, 3, -INF, -INF, 0]


def test_all_else_is_far_below_in_the_leaders_order() -> None:
    candidates = top_k_union(OWN, 2, [])
    blended = torch.tensor([[-INF, -0.1, -INF, -INF, -INF], [-INF, -INF, -INF, -3.0, -0.5]])
    ranked = rank_others_below(blended, OWN, candidates)
    assert ranked[0, :2].tolist() == pytest.approx([-INF, -0.1])
    assert ranked[0, 2:].tolist() == pytest.approx([-10002.1, -10003.1, -10004.1])
    assert ranked[1, 3:].tolist() == [-3.0, -0.5]
    assert ranked[1, :3].argmax() == 2
    assert ranked[1, :3].max() < -1e4


def test_the_leader_replaces_a_member_without_logits() -> None:
    logits = torch.tensor([[-INF] * 5, [1.0, -INF, -INF, -INF, -INF]])
    assert replace_empty(logits, OWN).tolist() == [OWN[0].tolist(), logits[1].tolist()]


def test_a_members_padding_is_no_candidate() -> None:
    own = torch.tensor([[3.0, 2.0, 1.0]])
    assert top_k_union(own, 1, [[[1, 3]]]).tolist() == [[True, True, False]]
