"""Text deltas concatenate to the whole text, however its tokens arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.tokenizers.detokenizer import Detokenizer
from tests.support.byte_level import byte_level_tokenizer
from tests.support.properties import repeatable
from tests.support.tokenizers import sentencepiece_tokenizer

INCOMPLETE = "\ufffd"
UNICODE = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("👩‍👍🏽🇮🇱é́漢ש \ufffd"), max_size=25)


def decode(tokens: list[int]) -> str:
    return str(byte_level_tokenizer().decode(tokens))


def split(data: st.DataObject, tokens: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=len(tokens))))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


@repeatable
@given(st.data(), UNICODE, UNICODE)
def test_any_split_of_any_text(data: st.DataObject, prompt: str, text: str) -> None:
    context = byte_level_tokenizer().encode(prompt).ids
    tokens = byte_level_tokenizer().encode(text).ids
    detokenizer = Detokenizer(decode, prompt=context)
    pieces = [detokenizer.add(part) for part in split(data, tokens)]
    assert "".join(pieces) + detokenizer.flush() == text
    assert INCOMPLETE in text or not any(INCOMPLETE in piece for piece in pieces)
    assert detokenizer.flush() == ""


@repeatable
@given(st.data(), st.lists(st.integers(0, 319), max_size=30))
def test_any_tokens_even_if_they_are_no_text(data: st.DataObject, tokens: list[int]) -> None:
    tokens = [token for token in tokens if token < byte_level_tokenizer().get_vocab_size()]
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(part) for part in split(data, tokens)]
    assert not any(piece.endswith(INCOMPLETE) for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == decode(tokens)


def test_bytes_that_are_no_text_are_shown_alike_however_they_come() -> None:
    """A decoder with byte fallback takes back a character that bytes follow which are none."""
    tokenizer = sentencepiece_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = [vocabulary[f"<0x{byte:02X}>"] for byte in "漢字".encode()[:4]]
    texts = []
    for parts in ([tokens], [[token] for token in tokens]):
        detokenizer = Detokenizer(lambda tokens: str(tokenizer.decode(tokens)))
        texts.append("".join([detokenizer.add(part) for part in parts]) + detokenizer.flush())
    assert texts[0] == texts[1]


def test_a_character_in_four_tokens_is_shown_with_the_last() -> None:
    tokens = byte_level_tokenizer().encode("𐍈").ids
    assert len(tokens) == 4
    detokenizer = Detokenizer(decode)
    assert [detokenizer.add([token]) for token in tokens] == ["", "", "", "𐍈"]


def test_only_a_short_window_is_decoded() -> None:
    longest = 0

    def watched(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    detokenizer = Detokenizer(watched, prompt=[1] * 5)
    for token in byte_level_tokenizer().encode("漢字 the cat sat " * 50).ids:
        detokenizer.add([token])
    assert longest <= 12


@pytest.mark.parametrize("endless", ["𐍈", "a𐍈"])
def test_the_window_stays_short_where_no_character_ever_ends(endless: str) -> None:
    """Many incomplete characters, each without its last byte, then some text."""
    longest = 0

    def watched(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    encode = byte_level_tokenizer().encode
    tokens = [*encode("so: ").ids, *encode(endless).ids[:-1] * 500, *encode(" the end, 漢字").ids]
    detokenizer = Detokenizer(watched, prompt=encode("Once upon").ids)
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.flush()
    assert longest <= 100
    assert text == decode(tokens)


def test_tokens_without_text_are_not_read_again_and_again() -> None:
    """Special tokens, for instance, which decoders skip. The next token keeps its space: the text began before."""
    tokenizer = sentencepiece_tokenizer()
    (end,) = tokenizer.encode("</s>", add_special_tokens=False).ids
    words = tokenizer.encode("the cat").ids
    longest = 0

    def watched(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return str(tokenizer.decode(tokens))

    tokens = [*words, *[end] * 400, *words]
    detokenizer = Detokenizer(watched)
    text = "".join(detokenizer.add([token]) for token in tokens) + detokenizer.flush()
    assert longest <= 100
    assert text == str(tokenizer.decode(tokens))


@repeatable
@given(st.lists(st.integers(0, 319), min_size=1, max_size=6), st.integers(20, 80))
def test_long_runs_of_anything_are_read_as_a_whole(tokens: list[int], times: int) -> None:
    tokens = [token for token in tokens if token < byte_level_tokenizer().get_vocab_size()] * times
    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add([token]) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == decode(tokens)


@pytest.mark.parametrize("characters", range(1, 9))
def test_context_begins_with_a_whole_character(characters: int) -> None:
    """Emoji take four tokens each, so most context lengths begin within one."""
    prompt = byte_level_tokenizer().encode("😀" * characters + "a").ids
    tokens = byte_level_tokenizer().encode("😀x").ids
    detokenizer = Detokenizer(decode, prompt=prompt)
    assert "".join(detokenizer.add([token]) for token in tokens) + detokenizer.flush() == "😀x"


def test_a_prompt_that_ends_within_a_character_loses_no_later_text() -> None:
    ids = byte_level_tokenizer().encode("😀xyz").ids
    detokenizer = Detokenizer(decode, prompt=ids[:2])
    text = "".join(detokenizer.add([token]) for token in ids[2:]) + detokenizer.flush()
    assert text.endswith("xyz")
