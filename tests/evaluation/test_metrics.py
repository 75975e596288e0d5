"""Each metric against values worked out by hand."""

import math
from itertools import pairwise

import pytest

from evaluation.metrics import (
    TextMetrics,
    average,
    distinct,
    measure,
    metrics_table,
    ngram_entropy,
    repetition,
    table,
)
from evaluation.prompts import MAX_TOKENS, PROMPTS

TEXT = ["a", "b", "a", "b", "a", "c"]  # a: 3, b: 2, c: 1; ab: 2, ba: 2, ac: 1; aba: 2, bab: 1, bac: 1


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, 0.5 * 1 + math.log2(3) / 3 + math.log2(6) / 6),
        (2, 2 * 0.4 * math.log2(2.5) + 0.2 * math.log2(5)),
        (3, 1.5),
        (6, 0.0),
        (7, 0.0),
    ],
)
def test_entropy(n: int, expected: float) -> None:
    assert ngram_entropy(TEXT, n) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "expected"), [(1, 3 / 6), (2, 3 / 5), (3, 3 / 4), (4, 1.0), (7, 0.0)])
def test_distinct(n: int, expected: float) -> None:
    assert distinct(TEXT, n) == pytest.approx(expected)
    assert distinct([ord(token) for token in TEXT], n) == pytest.approx(expected)


def test_repetition() -> None:
    assert repetition(TEXT) == 0
    assert repetition(TEXT, 1) == pytest.approx(1 / 2)
    assert repetition([1, 2, 3, 4] * 4) == pytest.approx(1 - 4 / 13)
    assert repetition([1, 2, 3]) == 0


def test_fifty_different_tokens_have_the_greatest_entropy() -> None:
    metrics = measure(range(50))
    assert [metrics.entropy_1, metrics.entropy_2, metrics.entropy_3] == pytest.approx(
        [math.log2(n) for n in (50, 49, 48)]
    )
    assert (metrics.distinct_1, metrics.distinct_2, metrics.repetition) == (1, 1, 0)


def test_likelihood_is_per_token() -> None:
    assert measure([5, 6, 7], [-1.0, -2.0, -6.0]).log_likelihood == -3
    assert measure([5, 6], [-1.0, -math.inf]).log_likelihood == -math.inf
    assert measure([5, 6], [-1, -2]).log_likelihood == -1.5
    assert measure([5, 6]).log_likelihood is None


def test_an_empty_text_has_no_metrics() -> None:
    assert measure([], []) == TextMetrics(
        tokens=0, entropy_1=0, entropy_2=0, entropy_3=0, distinct_1=0, distinct_2=0, repetition=0, log_likelihood=0
    )


def test_texts_count_the_same_whatever_their_length() -> None:
    mean = average([measure([1, 1], [-1, -3]), measure([1, 2, 3, 4], [-1, -1, -1, -1])])
    assert (mean.tokens, mean.entropy_1, mean.distinct_1, mean.log_likelihood) == (3, 1, 0.75, -1.5)
    assert mean.entropy_2 == pytest.approx(math.log2(3) / 2)
    assert average([measure([1], [-1]), measure([1])]).log_likelihood is None


def test_more_repetition_is_worse_in_each_metric() -> None:
    texts = [measure([i % period for i in range(60)]) for period in (3, 10, 60)]
    for less, more in pairwise(texts):
        assert less.entropy_1 < more.entropy_1
        assert less.distinct_2 < more.distinct_2
        assert less.repetition > more.repetition


def test_what_cannot_be_measured() -> None:
    with pytest.raises(ValueError, match="2 log-probabilities for 3 tokens"):
        measure([1, 2, 3], [-1, -2])
    with pytest.raises(ValueError, match="no texts"):
        average([])
    with pytest.raises(ValueError, match="not 0"):
        ngram_entropy([1], 0)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert table(["name", "n"], [["a", "1.0"], ["longer", "20"]]).split("\n") == [
        "name      n",
        "------  ---",
        "a       1.0",
        "longer   20",
    ]
    assert table(["name", "n"], []) == "name  n\n----  -"


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        table(["a", "b"], [["1"]])


def test_metrics_beside_each_other() -> None:
    plain = TextMetrics(
        tokens=50, entropy_1=4.994, entropy_2=5.17, entropy_3=5.14, distinct_1=0.895, distinct_2=1, repetition=0
    )
    judged = TextMetrics(
        tokens=49.6, entropy_1=5, entropy_2=5, entropy_3=5, distinct_1=0.9, distinct_2=1, repetition=0.25,
        log_likelihood=-2.345,
    )  # fmt: skip
    head, _, first, second = metrics_table({"target": plain, "blend": judged}).split("\n")
    assert head.split() == ["tokens", *[f"entropy-{n}" for n in (1, 2, 3)], "distinct-1", "distinct-2",
                            "repetition", "likelihood"]  # fmt: skip
    assert first.split() == ["target", "50", "4.99", "5.17", "5.14", "0.895", "1.000", "0.000", "–"]
    assert second.split() == ["blend", "50", "5.00", "5.00", "5.00", "0.900", "1.000", "0.250", "-2.35"]
    wider = metrics_table({"target": plain}, more={"target": ["812.0"]}, more_head=["tokens/s"]).split("\n")
    assert wider[0].endswith("tokens/s")
    assert wider[2].endswith("812.0")


def test_the_built_in_set() -> None:
    assert len(set(PROMPTS)) == 5
    assert MAX_TOKENS == 50
