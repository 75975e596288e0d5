"""Vocabularies that share token strings: reports and refusals."""

from tokenizers import Tokenizer

from decoding.tokenizers.alignment import compare_vocabularies, counterparts
from decoding.tokenizers.vocabulary import Vocabulary
from tests.support.byte_level import byte_level_tokenizer
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_tokenizer, unigram_tokenizer, vocabulary_of

A = Vocabulary.build({"Ġa": 0, "b": 1, "c": 2, "<s>": 3, "</s>": 4}, control={"<s>": "bos", "</s>": "eos"}, size=6)
B = Vocabulary.build({"<end>": 0, "▁a": 1, "c": 2, "<0x63>": 3, "d": 4}, control={"<end>": "eos"})


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
    assert counterparts(A, B).tolist() == [1, -1, 2, -1, 0, -1]
    assert counterparts(B, A).tolist() == [4, 0, 2, -1, -1]
    assert counterparts(B, B).tolist() == [0, 1, 2, 3, 4]


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
