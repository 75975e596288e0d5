"""Tokens and their sources are matched with the text, however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from cli.console.attribution import Attribution, TextSpan

SOURCES = ("accepted", "recovered", "bonus", "plain")
TOKENS = st.lists(st.tuples(st.text("aé\n", max_size=3), st.sampled_from(SOURCES)), max_size=8)


def details(tokens: list[tuple[str, str]]) -> list[dict[str, object]]:
    return [{"id": 0, "text": text, "source": source} for text, source in tokens]


@given(tokens=TOKENS, data=st.data())
def test_every_character_gets_its_tokens_source(tokens: list[tuple[str, str]], data: st.DataObject) -> None:
    text = "".join(text for text, _ in tokens)
    held_back = data.draw(st.integers(0, len(text)))
    attribution = Attribution()
    pieces = attribution.split(text[:held_back], details(tokens)) + attribution.split(text[held_back:], [])
    expected = [(character, source) for text, source in tokens for character in text]
    assert [(character, piece.source) for piece in pieces for character in piece.text] == expected
    assert attribution.counts.total() == len(tokens)


def test_text_that_does_not_match_has_no_source_and_is_all_there() -> None:
    attribution = Attribution()
    pieces = attribution.split("né!", details([("n", "plain"), ("\ufffd", "bonus"), ("!", "accepted")]))
    assert pieces == [TextSpan("n", "plain"), TextSpan("é!", "")]
    assert attribution.split(" so", details([(" so", "bonus")])) == [TextSpan(" so", "bonus")]


def test_without_details_there_are_no_sources() -> None:
    assert Attribution().split("text", ()) == [TextSpan("text", "")]
    assert Attribution().split("", ()) == []
