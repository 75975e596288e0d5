"""Texts end at the same position, in whatever pieces they arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.sampling.stopping import StopStrings, cut_at_stop
from tests.support.properties import repeatable

TEXT = st.text("ab.\n", max_size=30)
STOPS = st.lists(st.text("ab.\n", min_size=1, max_size=4), max_size=3)


def cut_by_hand(text: str, stops: list[str], passed: int = 0) -> tuple[str, bool]:
    """Search character by character: the text ends before the first complete stop string, the longest of several.

    passed: number of characters at which no stop string may end.
    """
    for end in range(passed + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def stream(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    finder, shown = StopStrings(stops), ""
    for piece in pieces:
        safe, stop_string = finder.add(piece)
        shown += safe
        if stop_string:
            return shown, True
    return shown + finder.flush(), False


@repeatable
@given(st.lists(TEXT, max_size=8), STOPS)
def test_any_pieces_give_the_same_text(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    assert stream(pieces, stops) == stream(list(text), stops) == cut_by_hand(text, stops)


@repeatable
@given(st.lists(TEXT, max_size=8), st.lists(TEXT, max_size=8), STOPS)
def test_a_stop_string_may_begin_where_none_may_end(before: list[str], after: list[str], stops: list[str]) -> None:
    finder, shown, is_stopped = StopStrings(stops), "", False
    for index, piece in enumerate([*before, *after]):
        safe, stop_string = finder.add(piece, may_end=index >= len(before))
        shown += safe
        if is_stopped := stop_string is not None:
            break
    text = "".join([*before, *after])
    assert (shown + finder.flush(), is_stopped) == cut_by_hand(text, stops, len("".join(before)))


@repeatable
@given(st.lists(TEXT, max_size=8), STOPS)
def test_what_is_shown_is_never_taken_back_and_little_is_held(pieces: list[str], stops: list[str]) -> None:
    finder, shown, text = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        safe, stop_string = finder.add(piece)
        shown += safe
        assert text.startswith(shown)
        if stop_string:
            return
        assert len(text) - len(shown) < max(map(len, stops), default=1)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["Hello wor", "ld"], ["world"], "Hello "),
        (["a\n", "\nb"], ["\n\n"], "a"),
        (["aa", "ab"], ["aab"], "a"),
        (["xabz"], ["abz", "b"], "xa"),
        (["x", "a", "b", "z"], ["abz", "b"], "xa"),
        (["no stop"], ["stopp"], "no stop"),
    ],
)
def test_examples(pieces: list[str], stops: list[str], shown: str) -> None:
    assert stream(pieces, stops)[0] == shown


@pytest.mark.parametrize(
    ("tokens", "generated", "kept", "finish"),
    [
        ([5, 6], 0, [5, 6], None),
        ([5, 2, 6], 0, [5, 2], "stop"),
        ([5, 3, 2], 0, [5, 3], "stop"),
        ([5, 6, 7], 8, [5, 6], "length"),
        ([5, 2, 7], 8, [5, 2], "stop"),
        ([5], 9, [5], "length"),
        ([5], 8, [5], None),
    ],
)
def test_eos_and_length(tokens: list[int], generated: int, kept: list[int], finish: str | None) -> None:
    assert cut_at_stop(tokens, generated, end_token_ids={2, 3}, max_tokens=10) == (kept, finish)
