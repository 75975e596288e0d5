"""The bytes of tokens, in both conventions of tokenizers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from decoding.tokenizers.vocabulary import Vocabulary, compare_vocabularies, counterparts, find_convention, token_bytes
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

A = Vocabulary.build({"Ġa": 0, "b": 1, "c": 2, "<s>": 3, "</s>": 4}, control={"<s>": "bos", "</s>": "eos"}, size=6)
B = Vocabulary.build({"<end>": 0, "▁a": 1, "c": 2, "<0x63>": 3, "d": 4}, control={"<end>": "eos"})


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


def test_a_report_by_hand() -> None:
    compatibility = compare_vocabularies(A, B)
    assert (compatibility.target_size, compatibility.other_size, compatibility.shared, compatibility.same_ids) == (
        5,
        5,
        3,
        1,
    )
    assert compatibility.spellable == 4  # all but "d"
    assert compatibility.readable == 3  # all but "b" and the token that begins a text
    assert not compatibility.identical
    assert str(compatibility) == (
        "3 of 5 token strings are among the target's 5 (60%), 1 with the same id; 4 can be written in its tokens; "
        "any byte can be written by neither"
    )


def test_counterparts_by_hand() -> None:
    assert counterparts(A, B) == [1, -1, 2, -1, 0, -1]
    assert counterparts(B, A) == [4, 0, 2, -1, -1]
    assert counterparts(B, B) == [0, 1, 2, 3, 4]


def permuted(tokenizer: Tokenizer) -> Vocabulary:
    """Return the same tokens with the ids in reverse order."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    roles = {"<|pad|>": "pad", "<|begin|>": "bos", "<|end|>": "eos"}
    return Vocabulary.build({token: len(tokens) - 1 - index for token, index in tokens.items()}, control=roles)


def test_the_same_tokens_in_another_order() -> None:
    compatibility = compare_vocabularies(vocabulary_of(bundled_tokenizer()), permuted(bundled_tokenizer()))
    assert compatibility.shared == 2045  # without role names, which are text in the other vocabulary
    assert compatibility.same_ids == 0
    assert not compatibility.identical
    assert compatibility.blending_obstacle is None


def test_the_same_tokens_twice() -> None:
    for tokenizer in (bundled_tokenizer(), sentencepiece_tokenizer()):  # the latter has two tokens for some bytes
        vocabulary = vocabulary_of(tokenizer)
        compatibility = compare_vocabularies(vocabulary, vocabulary)
        assert compatibility.identical
        assert str(compatibility) == f"the same {vocabulary.size} tokens"


def test_what_can_work_and_what_cannot() -> None:
    bundled, level, piece, unigram = (
        vocabulary_of(tokenizer)
        for tokenizer in (bundled_tokenizer(), byte_level_tokenizer(), sentencepiece_tokenizer(), unigram_tokenizer())
    )
    for target, other in ((bundled, piece), (piece, bundled), (bundled, unigram)):
        assert compare_vocabularies(target, other).drafting_obstacle is None
        assert compare_vocabularies(target, other).blending_obstacle is None
    obstacle = compare_vocabularies(unigram, level).drafting_obstacle
    assert obstacle is not None
    assert "of the drafter's 320 tokens" in obstacle
    assert 'role "eos"' in str(compare_vocabularies(bundled, level).blending_obstacle)


def test_members_that_hardly_share_a_text_are_refused() -> None:
    digits = Vocabulary.build({"<end>": 0} | {str(digit): 1 + digit for digit in range(10)}, control={"<end>": "eos"})
    bundled = vocabulary_of(bundled_tokenizer())
    count = 1 + sum(isinstance(meaning, bytes) and meaning.isdigit() for meaning in bundled.meanings)
    here, there = (
        compare_vocabularies(bundled, digits).blending_obstacle,
        compare_vocabularies(digits, bundled).blending_obstacle,
    )
    assert f"it can write only {count} of the leader's 2048 tokens" in str(here)
    assert f"the leader can write only {count} of its 2048 tokens" in str(there)
