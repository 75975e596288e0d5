"""Where an answer's text ends."""

import pytest

from actors.coordinator.text_stream import TextStream
from decoding.sampling.params import SamplingParams


def spell(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "shown", "used"),
    [
        ("abENDxyzEND", "END", 0, "ab", 5),
        ("abENDxyzEND", "END", 3, "ab", 5),
        ("abENDxyzEND", "END", 4, "ab", 5),
        ("abENDxyzEND", "END", 5, "ab", 5),
        ("abENDxyzEND", "END", 6, "abENDxyz", 11),
        ("aaaa", "aa", 3, "a", 3),  # one that ended too early may be the next one's beginning
        ("abEN", "END", 3, "abEN", 4),
    ],
)
@pytest.mark.parametrize("together", [1, 3, 11])
def test_a_stop_string_counts_if_it_ends_after_min_tokens(
    text: str, stop: str, min_tokens: int, shown: str, used: int, together: int
) -> None:
    stream = TextStream(spell, [32], SamplingParams(max_tokens=99, stop=(stop,), min_tokens=min_tokens))
    pieces = []
    for begin in range(0, len(text), together):
        pieces.append(stream.add([ord(char) for char in text[begin : begin + together]], None))
        if pieces[-1].finish is not None:
            break
    assert "".join(piece.text for piece in pieces) + stream.flush() == shown
    assert sum(piece.used for piece in pieces) == used
