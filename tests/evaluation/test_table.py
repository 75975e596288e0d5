"""Tables as a person reads them."""

import pytest

from evaluation.metrics import TextMetrics, metrics_table, table
from evaluation.prompts import MAX_TOKENS, PROMPTS


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
