"""The bytes of tokens, in both conventions of tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoding.tokenizers.vocabulary import Vocabulary, find_convention, token_bytes
from tests.support.byte_level import byte_level_tokenizer
from tests.support.properties import repeatable
from tests.support.tokenizers import (
    HARD_TEXTS,
    bundled_tokenizer,
    held_out_texts,
    sentencepiece_tokenizer,
    speller_of,
    unigram_tokenizer,
    vocabulary_of,
)


@pytest.mark.parametrize(
    ("token", "convention", "expected"),
    [
        ("Ġthe", "byte_level", b" the"),
        ("Ċ", "byte_level", b"\n"),
        ("Ã©", "byte_level", "é".encode()),
        ("æ¼", "byte_level", b"\xe6\xbc"),
        ("  ", "byte_level", b"  "),  # an added token, as in phi
        ("▁the", "sentencepiece", b" the"),
        ("▁▁", "sentencepiece", b"  "),
        ("<0x0A>", "sentencepiece", b"\n"),
        ("<0xe9>", "sentencepiece", b"\xe9"),
        ("<0x0A>s", "sentencepiece", b"<0x0A>s"),
        ("é", "sentencepiece", "é".encode()),
        ("Ġ", "plain", "Ġ".encode()),
        ("<0x0A>", "plain", b"<0x0A>"),
    ],
)
def test_a_token_of_text(token: str, convention: str, expected: bytes) -> None:
    assert token_bytes(token, convention) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", "▁a", "▁", "Ġ"], "sentencepiece"),
        (["a", "Ġa", "Ġb", "▁"], "byte_level"),
        (["<0x00>", "<0x01>", "<0xFF>"], "sentencepiece"),
        (["a", "b", " "], "plain"),
        ([], "plain"),
    ],
)
def test_the_convention_is_found(tokens: list[str], expected: str) -> None:
    assert find_convention(tokens) == expected


def test_every_byte_has_its_own_character() -> None:
    vocabulary = vocabulary_of(byte_level_tokenizer())
    assert vocabulary.spells_any_byte
    assert {meaning for meaning in vocabulary.meanings if len(meaning or "") == 1} == {
        bytes([byte]) for byte in range(256)
    }


def test_control_tokens_added_tokens_and_padding() -> None:
    tokens = {"Ġa": 0, "é": 1, "<|end|>": 2, "<|user|>": 3, "<tool>": 5, "Ã©": 6, "Ġb": 9}
    vocabulary = Vocabulary.build(
        tokens, control={"<|end|>": "eos", "<|user|>": "<|user|>"}, added={"é", "<tool>"}, size=8
    )  # fmt: skip
    e_acute = "é".encode()
    assert vocabulary.meanings == (b" a", e_acute, "eos", "<|user|>", None, b"<tool>", e_acute, None)
    assert vocabulary.ids[e_acute] == 1
    assert b" b" not in vocabulary.ids
    assert vocabulary.decode_bytes([0, 2, 4, 1]) == b" a" + e_acute
    assert Vocabulary.build({}).size == 0


def test_a_token_is_preferred_to_a_lone_byte() -> None:
    vocabulary = Vocabulary.build({"<0x41>": 0, "A": 1, "<0x0A>": 2, "▁A": 3})
    assert vocabulary.ids == {b"A": 1, b"\n": 2, b" A": 3}
    assert vocabulary.meanings == (b"A", b"A", b"\n", b" A")
    assert not vocabulary.spells_any_byte


def test_what_can_be_spelled() -> None:
    vocabulary = Vocabulary.build({"ab": 0, "é": 1, "a": 2, "▁": 3, "<0xC3>": 4, "<0xA8>": 5})
    for text in ("ab", "a", " a", "aéa", "è", ""):
        assert vocabulary.can_spell(text.encode())
    for text in ("b", "ba", "ê", "漢"):
        assert not vocabulary.can_spell(text.encode())
    assert vocabulary.can_spell(b"\xc3")
    assert not vocabulary.can_spell(b"a\xe9")


@pytest.mark.parametrize("text", [*HARD_TEXTS, "".join(held_out_texts()[::40])])
def test_tokens_spell_the_text(text: str) -> None:
    for tokenizer in (bundled_tokenizer(), byte_level_tokenizer()):
        assert (
            vocabulary_of(tokenizer).decode_bytes(tokenizer.encode(text, add_special_tokens=False).ids) == text.encode()
        )
    speller = speller_of(sentencepiece_tokenizer())
    assert speller.vocabulary.decode_bytes(speller.encode(text)) == (" " * (text[0] != " ") + text).encode()


@repeatable
@given(st.text())
def test_any_text_is_spelled(text: str) -> None:
    speller = speller_of(bundled_tokenizer())
    assert speller.vocabulary.decode_bytes(speller.encode(text)) == text.encode()
    assert speller.vocabulary.can_spell(text.encode())


def test_tokenizers_that_put_a_space_before_a_text() -> None:
    spellers = map(speller_of, (bundled_tokenizer(), sentencepiece_tokenizer(), unigram_tokenizer()))
    assert [speller.adds_space for speller in spellers] == [False, True, True]
