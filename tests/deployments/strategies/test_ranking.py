"""Which candidate wins, on candidates made by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.strategies.ranking import by_score, chrf, majority, minimum_risk

ANY = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0.1, 10), st.floats(-20, 0)), min_size=1, max_size=12
)


def test_the_highest_score_wins_and_ties_go_to_the_likelier() -> None:
    ranking = by_score([-2.0, -1.0, -1.0], [-1.0, -3.0, -2.0])
    assert ranking.order == [2, 1, 0]
    assert ranking.agreement is None


def test_most_votes_win_and_the_likeliest_of_them_speaks() -> None:
    ranking = majority(["4", "5", "4", None], [1, 1, 1, 1], [-3, -0.1, -2, -0.01])
    assert ranking.winner == 2
    assert ranking.votes == pytest.approx({"4": 2 / 3, "5": 1 / 3})
    assert ranking.agreement == pytest.approx(2 / 3)
    assert ranking.order == [2, 0, 1, 3]


def test_votes_are_weighed_and_ties_go_to_the_likelier_answer() -> None:
    assert majority(["a", "b", "b"], [0.8, 0.1, 0.1], [-9, -1, -1]).winner == 0
    assert majority(["a", "b"], [0.5, 0.5], [-2, -1]).winner == 1
    assert majority(["a", "b", "a", "b"], [0.1, 0.2, 0.2, 0.1], [-3, -2, -1, -4]).winner == 2


def test_without_any_answer_the_likeliest_candidate_wins() -> None:
    ranking = majority([None, None], [0.5, 0.5], [-2, -1])
    assert ranking.winner == 1
    assert ranking.agreement == 0
    assert ranking.votes == {}


@given(ANY)
def test_the_winning_answer_has_the_greatest_weight(candidates: list[tuple[str | None, float, float]]) -> None:
    answers, weights, likelihoods = (list(column) for column in zip(*candidates, strict=True))
    ranking = majority(answers, weights, likelihoods)
    totals = {answer: sum(w for a, w, _ in candidates if a == answer) for answer in set(answers) - {None}}
    won = answers[ranking.winner]
    assert sorted(ranking.order) == list(range(len(candidates)))
    assert (won is None) == (not totals)
    if won is not None:
        assert totals[won] >= max(totals.values()) - 1e-9
        assert likelihoods[ranking.winner] == max(likelihood for answer, _, likelihood in candidates if answer == won)
    assert all(ranking.scores[a] >= ranking.scores[b] for a, b in pairwise(ranking.order))


def test_minimum_risk_is_the_brute_force_expectation() -> None:
    texts, weights = ["the cat sat", "the cat sat down", "a dog ran", "the cat sat"], [0.4, 0.3, 0.2, 0.1]
    ranking = minimum_risk(texts, weights, [-1, -1, -1, -2], chrf)
    for i, text in enumerate(texts):
        others = [(w, chrf(text, other)) for j, (other, w) in enumerate(zip(texts, weights, strict=True)) if j != i]
        expected = sum(w * value for w, value in others) / sum(w for w, _ in others)
        assert abs(ranking.scores[i] - expected) < 1e-12
    assert ranking.order[-1] == 2
    assert minimum_risk(["alone"], [1.0], [-1], chrf).winner == 0


def test_chrf_is_sacrebleus() -> None:
    assert chrf("the same", "the same") == 1
    assert 0 < chrf("the cat", "the bat") < 1
    assert chrf("abc", "xyz") == 0
