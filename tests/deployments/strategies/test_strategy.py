"""What is an answer within a text, what can't hold the server up, and which candidate wins."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.errors import ConfigError
from deployments.configuration.values import load_callable
from deployments.strategies.strategy import (
    by_json_field,
    by_regex,
    by_score,
    chrf,
    majority,
    minimum_risk,
    whole_text,
)

ANY = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.floats(0.1, 10), st.floats(-20, 0)), min_size=1, max_size=12
)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"answer is (-?\d+)", "The answer is 4, no: the answer is 12.", "12"),
        (r"\d+", "1 2 34", "34"),
        (r"(?i)(yes|no)", "Well, No.", "No"),
        (r"answer: (.*)", "answer:   two\twords ", "two words"),
        (r"(a)?b", "b", None),
        (r"x", "nothing", None),
        (r"(\w+)", "w" * 2000, None),
    ],
)
def test_regular_expressions(pattern: str, text: str, expected: str | None) -> None:
    assert by_regex(pattern, key="k")(text) == expected


@pytest.mark.parametrize("pattern", ["(", r"(a)(?=b)", r"(a)\1", "((a{1,100}){1,100}){1,100}", "x" * 1001])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"endpoints\.e\.strategy\.regex"):
        by_regex(pattern, key="endpoints.e.strategy.regex")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){12}", r"^(\w+\s?)*$"])
def test_no_text_holds_a_pattern_up(pattern: str) -> None:
    began_s = time.process_time()
    by_regex(pattern, key="k")("a" * 20_000 + "!")
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("answer", 'so: {"answer": 3}', "3"),
        ("answer", '{"answer": "first"} {"answer": " the  last "} {broken', "the last"),
        ("a.b", '{"a": {"b": [1, {"y": 2, "x": 1}]}}', '[1, {"x": 1, "y": 2}]'),
        ("answer", '{"other": 1}', None),
        ("answer", "[1]", None),
        ("a.b", '{"a": 3}', None),
        ("answer", "{" * 50_000, None),
        ("answer", '{"answer":' * 50_000, None),
    ],
)
def test_json_fields(path: str, text: str, expected: str | None) -> None:
    assert by_json_field(path)(text) == expected


def test_whole_texts_differ_by_more_than_white_space() -> None:
    assert whole_text(" a\n b ") == "a b"
    assert whole_text("  ") is None


def test_utilities_are_loaded_by_name() -> None:
    assert load_callable("difflib:get_close_matches", key="k") is not None
    with pytest.raises(ConfigError, match="k: can't load 'nowhere:f'"):
        load_callable("nowhere:f", key="k")
    with pytest.raises(ConfigError, match="k: 'math:pi' is a float"):
        load_callable("math:pi", key="k")


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
