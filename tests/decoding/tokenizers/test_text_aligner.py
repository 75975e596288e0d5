"""Texts and drafts between the bundled tokenizer and others, compared with encoding the whole text."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from decoding.tokenizers.text_aligner import Speller, TextAligner
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

MAKERS = [bundled_tokenizer, byte_level_tokenizer, sentencepiece_tokenizer]
PAIRS = [*permutations(MAKERS, 2), (bundled_tokenizer, bundled_tokenizer), (bundled_tokenizer, unigram_tokenizer)]
EOS, USER = 2, 4  # of the bundled tokenizer

texts = st.one_of(
    st.sampled_from([*HARD_TEXTS, *held_out_texts()]),
    st.text(max_size=30),
    st.text(alphabet="ab  \n.,'é漢_1", max_size=40),
    st.builds("{}{}".format, st.sampled_from(held_out_texts()), st.sampled_from(HARD_TEXTS)),
).filter(lambda text: text and "▁" not in text)  # SentencePiece can't tell it from a space
pairs = st.sampled_from(PAIRS)


def aligner_of(target: Tokenizer, drafter: Tokenizer, prefix: Sequence[int] = ()) -> TextAligner:
    return TextAligner(speller_of(target), speller_of(drafter), prefix)


def whole(data: bytes) -> str:
    """Return the complete characters."""
    return data.decode("utf-8", "ignore")


@repeatable
@given(pairs, texts, st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_text_is_written_as_if_it_came_at_once(pair: tuple, text: str, sizes: list[int]) -> None:
    """The result does not depend on how the text is cut, and tokens reported as kept are kept."""
    target, drafter = speller_of(pair[0]()), speller_of(pair[1]())
    tokens = target.encode(text)
    aligner = TextAligner(target, drafter)
    end = turn = 0
    while end < len(tokens):
        before = list(aligner.tokens)
        kept = aligner.commit(tokens[end : end + sizes[turn % len(sizes)]])
        end, turn = end + sizes[turn % len(sizes)], turn + 1
        committed = target.strip(target.vocabulary.decode_bytes(tokens[:end]))
        assert aligner.tokens == drafter.encode(whole(committed))
        assert aligner.tokens[:kept] == before[:kept]
        assert kept <= len(before)


@repeatable
@given(pairs, texts, texts, texts)
def test_what_is_certain_stays_whatever_comes_next(pair: tuple, before: str, draft: str, after: str) -> None:
    target, drafter = speller_of(pair[0]()), speller_of(pair[1]())
    drafted, longer = drafter.encode_continuation(draft), drafter.encode_continuation(draft + after)
    if drafted is None or longer is None:
        return
    aligner = TextAligner(target, drafter)
    aligner.commit(target.encode(before + "."))
    translation, more = aligner.translate(drafted), aligner.translate(longer)
    assert target.vocabulary.decode_bytes(translation.tokens) == draft.encode()
    assert target.vocabulary.decode_bytes(more.tokens) == (draft + after).encode()
    assert more.tokens[: translation.certain] == translation.tokens[: translation.certain]
    assert more.certain >= translation.certain


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[1] is not unigram_tokenizer])
def test_a_draft_of_the_text_itself_is_what_the_target_writes(pair: tuple) -> None:
    """Certain tokens hold always before a word and nearly always elsewhere. Most of a draft is offered."""
    target, drafter = speller_of(pair[0]()), speller_of(pair[1]())
    right = asked = certain = likely = offered = 0
    for text in held_out_texts()[:24]:
        tokens = target.encode(text)
        aligner = TextAligner(target, drafter)
        for end in range(1, len(tokens)):
            aligner.commit(tokens[end - 1 : end])
            rest = target.vocabulary.decode_bytes(tokens[end:])
            if 0x80 <= rest[0] < 0xC0:
                continue  # within a character
            drafted = drafter.encode_continuation(rest.decode())
            assert drafted is not None
            translation = aligner.translate(drafted[:8])
            same = translation.tokens[: translation.certain] == tokens[end : end + translation.certain]
            assert same or not rest.startswith(b" ") or rest[1:2].isspace(), (rest[:40], translation)
            right, asked = right + same, asked + 1
            agree = [a == b for a, b in zip(translation.tokens, tokens[end:], strict=False)]
            likely, certain = likely + [*agree, False].index(False), certain + translation.certain
            offered += len(translation.tokens)
    assert right >= 0.95 * asked
    assert likely >= 0.7 * offered
    assert certain >= 0.15 * offered


def test_a_word_is_certain_when_the_next_one_begins() -> None:
    bundled, piece = bundled_tokenizer(), sentencepiece_tokenizer()
    for target, drafter in ((bundled, piece), (piece, bundled)):
        aligner = aligner_of(target, drafter)
        aligner.commit(speller_of(target).encode("This is"))
        decode_bytes = speller_of(target).vocabulary.decode_bytes
        for draft, certain in ((" the", b""), (" the file", b" the"), (" the file is", b" the file")):
            translation = aligner.translate(speller_of(drafter).encode_continuation(draft) or [])
            assert decode_bytes(translation.tokens) == draft.encode()
            assert decode_bytes(translation.tokens[: translation.certain]) == certain


def test_signs_end_words_of_byte_level_tokenizers_alone() -> None:
    aligner = aligner_of(bundled_tokenizer(), sentencepiece_tokenizer())
    aligner.commit(speller_of(bundled_tokenizer()).encode("x"))
    translation = aligner.translate(speller_of(sentencepiece_tokenizer()).encode_continuation(" file(") or [])
    assert (
        speller_of(bundled_tokenizer()).vocabulary.decode_bytes(translation.tokens[: translation.certain]) == b" file"
    )
    aligner = aligner_of(sentencepiece_tokenizer(), bundled_tokenizer())
    aligner.commit(speller_of(sentencepiece_tokenizer()).encode("x"))
    assert aligner.translate(speller_of(bundled_tokenizer()).encode(" file(")).certain == 0


def test_half_a_character_waits_and_its_draft_must_go_on_with_it() -> None:
    bundled = vocabulary_of(bundled_tokenizer())
    first, *rest = [bundled.ids[bytes([byte])] for byte in "漢".encode()]
    piece = speller_of(sentencepiece_tokenizer())
    aligner = aligner_of(bundled_tokenizer(), sentencepiece_tokenizer())
    aligner.commit(speller_of(bundled_tokenizer()).encode("a"))
    before = list(aligner.tokens)
    assert aligner.commit([first]) == len(before)
    assert aligner.tokens == before
    drafted = piece.encode_continuation("漢 is")
    assert drafted is not None
    assert aligner.translate(drafted).tokens[:2] == rest
    assert bundled.decode_bytes(aligner.translate(drafted).tokens) == "漢 is".encode()[1:]
    assert aligner.translate(drafted[:1]).tokens == []  # no more than is committed
    assert aligner.translate(drafted[:2]).tokens == rest[:1]
    assert aligner.translate(piece.encode_continuation("b is") or []).tokens == []
    aligner.commit(rest)
    assert aligner.tokens == piece.encode("a漢")
    aligner.commit([first, bundled.ids[b"b"]])  # a character that is never completed
    assert aligner.tokens == piece.encode("a漢\ufffdb")


def test_a_draft_that_ends_within_a_character_is_translated_up_to_it() -> None:
    aligner = aligner_of(bundled_tokenizer(), sentencepiece_tokenizer())
    drafted = speller_of(sentencepiece_tokenizer()).encode("the 漢")[:-1]
    assert aligner.translate(drafted).tokens == speller_of(bundled_tokenizer()).encode("the ")


@pytest.mark.parametrize("text", ["the file", "\tfile", "漢"])
def test_a_text_begins_in_either_tokenizers_way(text: str) -> None:
    bundled, piece = speller_of(bundled_tokenizer()), speller_of(sentencepiece_tokenizer())
    for target, drafter in ((bundled, piece), (piece, bundled)):
        aligner = TextAligner(target, drafter)
        assert aligner.translate(drafter.encode(text)).tokens == target.encode(text)
        aligner.commit(target.encode(text))
        assert aligner.tokens == drafter.encode(text)


def test_control_tokens_are_translated_by_their_role() -> None:
    bundled, piece = speller_of(bundled_tokenizer()), speller_of(sentencepiece_tokenizer())
    bos, eos = piece.vocabulary.ids["bos"], piece.vocabulary.ids["eos"]
    aligner = TextAligner(bundled, piece)
    aligner.commit([1, USER, *bundled.encode("the"), EOS, *bundled.encode("file")])
    assert aligner.tokens == [bos, *piece.encode("the"), eos, *piece.encode("file")]
    translation = aligner.translate([*(piece.encode_continuation(" is") or []), eos, *piece.encode("more")])
    assert translation.tokens == [*bundled.encode(" is"), EOS]
    assert translation.certain == len(translation.tokens)
    assert aligner.translate([eos]).tokens == [EOS]
    backward = TextAligner(piece, bundled)
    backward.commit(piece.encode("the"))
    assert backward.translate([*bundled.encode(" file"), USER]).tokens == piece.encode_continuation(" file")


def test_a_drafter_that_needs_a_beginning_gets_one() -> None:
    piece = speller_of(sentencepiece_tokenizer())
    aligner = aligner_of(byte_level_tokenizer(), sentencepiece_tokenizer(), prefix=[piece.vocabulary.ids["bos"]])
    aligner.commit(speller_of(byte_level_tokenizer()).encode("the file"))
    aligner.commit(speller_of(byte_level_tokenizer()).encode(" is"))
    assert aligner.tokens == [piece.vocabulary.ids["bos"], *piece.encode("the file is")]


def test_what_the_target_cannot_write_is_no_draft() -> None:
    aligner = aligner_of(unigram_tokenizer(), bundled_tokenizer())
    aligner.commit(speller_of(unigram_tokenizer()).encode("the"))
    assert aligner.translate(speller_of(bundled_tokenizer()).encode(" 漢字")).tokens == []
    assert aligner.translate(speller_of(bundled_tokenizer()).encode(" file")).tokens != []


def test_a_long_text_costs_its_last_words() -> None:
    """The texts given to the drafter's tokenizer do not grow with the committed text."""
    asked: list[int] = []
    bundled, piece = speller_of(bundled_tokenizer()), speller_of(sentencepiece_tokenizer())

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return piece.encode(text)

    text = " ".join(held_out_texts()[:10])
    tokens = bundled.encode(text)
    aligner = TextAligner(bundled, Speller(piece.vocabulary, encode))
    for token in tokens:
        aligner.commit([token])
    assert aligner.tokens == piece.encode(text)
    assert len(tokens) > 500
    assert sorted(asked)[len(asked) // 2] < 20
    assert max(asked) < 300
