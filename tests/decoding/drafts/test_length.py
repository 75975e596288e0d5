"""Goodput control against exhaustive search, and in typical cases."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from decoding.drafts.length import AcceptanceEstimate, choose_draft_lengths, choose_draft_tokens


def goodput(acceptance: list[float], lengths: tuple[int, ...], fixed_s: float, token_s: float) -> float:
    """Return expected tokens per second (Leviathan et al. 2023, equation 1, for each row)."""
    expected = sum(
        sum(rate**depth for depth in range(length + 1)) for rate, length in zip(acceptance, lengths, strict=True)
    )
    return expected / (fixed_s + token_s * sum(1 + length for length in lengths))


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 4)), min_size=1, max_size=3),
    st.floats(0.0, 10.0),
    st.floats(0.01, 10.0),
)
def test_no_other_lengths_are_better(rows: list[tuple[float, int]], fixed_s: float, token_s: float) -> None:
    acceptance, limits = [rate for rate, _ in rows], [limit for _, limit in rows]
    probabilities = [[rate**depth for depth in range(1, limit + 1)] for rate, limit in rows]
    chosen = choose_draft_tokens(probabilities, lambda tokens: fixed_s + token_s * tokens)
    assert all(0 <= length <= limit for length, limit in zip(chosen, limits, strict=True))
    best = max(
        goodput(acceptance, lengths, fixed_s, token_s)
        for lengths in itertools.product(*(range(limit + 1) for limit in limits))
    )
    assert goodput(acceptance, tuple(chosen), fixed_s, token_s) >= best * (1 - 1e-9)


@given(
    st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 6)), min_size=1, max_size=3),
    st.floats(0.0, 10.0),
    st.floats(0.01, 10.0),
)
def test_no_other_common_length_is_better(rows: list[tuple[float, int]], fixed_s: float, token_s: float) -> None:
    acceptance, limits = [rate for rate, _ in rows], [limit for _, limit in rows]
    chosen = choose_draft_lengths(acceptance, limits, lambda tokens: fixed_s + token_s * tokens, 0.0)
    common = [tuple(min(length, limit) for limit in limits) for length in range(7)]
    assert tuple(chosen) in common
    best = max(goodput(acceptance, lengths, fixed_s, token_s) for lengths in common)
    assert goodput(acceptance, tuple(chosen), fixed_s, token_s) >= best * (1 - 1e-9)


def test_a_dear_token_does_not_hide_cheap_ones_behind_it() -> None:
    """Steps over 9 to 16 tokens cost the same."""
    assert choose_draft_tokens([[0.9] * 12], lambda tokens: 1.0 if tokens <= 4 else 2.0) == [12]


def test_free_tokens_are_all_verified() -> None:
    assert choose_draft_lengths([0.5, 0.9], [4, 6], lambda tokens: 1.0, 0.0) == [4, 6]


def test_a_step_bound_by_compute_decodes_plainly() -> None:
    assert choose_draft_lengths([0.8] * 8, [4] * 8, lambda tokens: float(tokens), 0.0) == [0] * 8


def test_promising_rows_get_longer_drafts() -> None:
    def length(rate: float) -> int:
        return choose_draft_lengths([rate] * 2, [8] * 2, lambda tokens: 5.0 + tokens, 0.0)[0]

    assert length(0.2) < length(0.6) < length(0.9)


def test_a_drafter_slower_than_the_target_is_not_waited_for() -> None:
    assert choose_draft_lengths([0.7], [4], lambda tokens: 1.0, draft_latency_s=2.0) == [0]
    assert choose_draft_lengths([0.7], [4], lambda tokens: 1.0, draft_latency_s=0.05) == [4]


def test_estimate_follows_what_it_sees_and_forgets() -> None:
    estimate = AcceptanceEstimate(0.3)
    assert 0.3 < estimate.value < 0.4
    for _ in range(200):
        estimate.note(drafted=4, accepted=4)
    assert estimate.value > 0.95
    for _ in range(200):
        estimate.note(drafted=4, accepted=0)
    assert estimate.value < 0.1
    for _ in range(400):
        estimate.note(drafted=0, accepted=0)
    assert abs(estimate.value - 0.6) < 0.03


def test_tokens_behind_a_rejection_are_not_counted() -> None:
    short, long = AcceptanceEstimate(), AcceptanceEstimate()
    short.note(drafted=2, accepted=1)
    long.note(drafted=8, accepted=1)
    assert short.value == long.value


def test_a_dear_first_token_pays_only_with_further_cheap_ones() -> None:
    """Heads read the last step before their first token."""

    def length(first_s: float, further_s: float) -> int:
        return choose_draft_lengths(
            [0.6], [4], lambda tokens: 6.0, further_s, first_latency_s=first_s, alternating=True
        )[0]

    assert length(2.0, 2.0) == 1
    assert length(2.0, 0.5) == length(6.0, 0.5) == 4
    assert length(9.0, 0.5) == 0
