"""Vocabularies that share token strings: reports, refusals, and distributions that move from one to another."""

import math

import pytest
import torch
from tokenizers import Tokenizer

from decoding.alignment import Alignment, compare, counterparts, keep_best
from decoding.blend import BlendBatch, blend
from decoding.blend_params import BlendParams
from decoding.errors import ConfigError
from decoding.vocabulary import Vocabulary
from tests.support.byte_level import byte_level_tokenizer
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_tokenizer, unigram_tokenizer, vocabulary_of

A = Vocabulary.build({"Ġa": 0, "b": 1, "c": 2, "<s>": 3, "</s>": 4}, control={"<s>": "bos", "</s>": "eos"}, size=6)
B = Vocabulary.build({"<end>": 0, "▁a": 1, "c": 2, "<0x63>": 3, "d": 4}, control={"<end>": "eos"})


def random_logits(vocabulary: Vocabulary, seed: int) -> torch.Tensor:
    return torch.randn(4, vocabulary.size, generator=torch.Generator().manual_seed(seed))


def test_a_report_by_hand() -> None:
    found = compare(A, B)
    assert (found.target_size, found.drafter_size, found.shared, found.same_ids) == (5, 5, 3, 1)
    assert found.spellable == 4  # all but "d"
    assert found.missing_ascii == "b"
    assert not found.identical
    assert str(found) == (
        "3 of 5 token strings are among the target's 5 (60%), 1 with the same id; 4 can be written in its tokens; "
        "any byte can be written by neither"
    )


def test_counterparts_by_hand() -> None:
    assert counterparts(A, B).tolist() == [1, -1, 2, -1, 0, -1]
    assert counterparts(B, A).tolist() == [4, 0, 2, -1, -1]
    assert counterparts(B, B).tolist() == [0, 1, 2, 3, 4]


def test_shared_and_union_by_hand() -> None:
    with pytest.raises(ConfigError, match=r"members 0 and 1.*no token for 'b'"):
        Alignment.build([A, B], "shared")
    union = Alignment.build([A, B], "union")
    assert union.texts == (b"d",)
    assert union.sources.tolist() == [[0, 1, 2, 3, 4, 5, -1], [1, -1, 2, -1, 0, -1, 4]]
    logits = torch.tensor([[10.0, 11.0, 12.0, 13.0, 14.0]])
    assert union.project(logits, 1).tolist() == [[11.0, -math.inf, 12.0, -math.inf, 10.0, -math.inf, 14.0]]
    padded = torch.cat((logits, torch.full((1, 3), 99.0)), dim=1)  # a model has more rows than tokens
    assert torch.equal(union.project(padded, 1), union.project(logits, 1))


def test_the_shared_tokens_of_three() -> None:
    bundled = vocabulary_of(bundled_tokenizer())
    others = [vocabulary_of(tokenizer) for tokenizer in (sentencepiece_tokenizer(), unigram_tokenizer())]
    alignment = Alignment.build([others[1], bundled, others[0]], "shared")
    assert alignment.size == others[1].size
    assert alignment.texts == ()
    shared = bundled.ids.keys() & others[0].ids.keys() & others[1].ids.keys()
    assert int((alignment.sources[0] >= 0).sum()) == len(shared)
    for vocabulary, sources in zip((others[1], bundled, others[0]), alignment.sources.tolist(), strict=True):
        assert {vocabulary.meanings[at] for at in sources if at >= 0} == shared


def test_the_union_of_three_keeps_each_members_distribution() -> None:
    tokenizers = (bundled_tokenizer(), sentencepiece_tokenizer(), unigram_tokenizer())
    vocabularies = [vocabulary_of(tokenizer) for tokenizer in tokenizers]
    alignment = Alignment.build(vocabularies, "union")
    projected = [alignment.project(random_logits(v, i), i) for i, v in enumerate(vocabularies)]
    assert torch.equal(projected[0][:, : vocabularies[0].size], random_logits(vocabularies[0], 0))
    for i, vocabulary in enumerate(vocabularies):
        for text in (b" the", b"e", "eos"):
            at = alignment.sources[i].tolist().index(vocabulary.ids[text])
            assert torch.equal(projected[i][:, at], random_logits(vocabulary, i)[:, vocabulary.ids[text]])
        used = [at for at in alignment.sources[i].tolist() if at >= 0]
        assert len(used) == len(set(used))
    lonely = BlendBatch.build([(BlendParams(weights=(1, 0, 0)), (True,) * 3)] * 4)
    assert torch.equal(blend(torch.stack(projected), lonely)[:, :2048], random_logits(vocabularies[0], 0))
    assert blend(torch.stack(projected), BlendBatch.build([(BlendParams(), (True,) * 3)] * 4)).isfinite().all()


@pytest.mark.parametrize("kind", ["shared", "union"])
def test_the_same_tokens_need_no_moving(kind: str) -> None:
    for tokenizer in (bundled_tokenizer(), sentencepiece_tokenizer()):  # the latter has two tokens for some bytes
        vocabulary = vocabulary_of(tokenizer)
        found = compare(vocabulary, vocabulary_of(tokenizer))
        assert found.identical
        assert str(found) == f"the same {vocabulary.size} tokens"
        alignment = Alignment.build([vocabulary, vocabulary, vocabulary], kind)  # type: ignore[arg-type]
        assert alignment.is_identity
        assert torch.equal(alignment.project(random_logits(vocabulary, 1), 2), random_logits(vocabulary, 1))
    assert not Alignment.build([A, B], "union").is_identity


def permuted(tokenizer: Tokenizer) -> Vocabulary:
    """The same tokens with the ids the other way round."""
    tokens = tokenizer.get_vocab(with_added_tokens=True)
    roles = {"<|pad|>": "pad", "<|begin|>": "bos", "<|end|>": "eos"}
    return Vocabulary.build({token: len(tokens) - 1 - at for token, at in tokens.items()}, control=roles)


def test_ids_in_another_order_are_put_in_order() -> None:
    bundled, turned = vocabulary_of(bundled_tokenizer()), permuted(bundled_tokenizer())
    found = compare(bundled, turned)
    assert (found.shared, found.same_ids) == (2045, 0)  # without the names of roles, which are text to the other
    logits = random_logits(turned, 1)
    moved = Alignment.build([bundled, turned], "shared").project(logits, 1)
    assert torch.equal(moved[:, 6:], logits.flip(-1)[:, 6:])


def test_what_can_work_and_what_cannot() -> None:
    bundled, level, piece, unigram = (
        vocabulary_of(tokenizer)
        for tokenizer in (bundled_tokenizer(), byte_level_tokenizer(), sentencepiece_tokenizer(), unigram_tokenizer())
    )
    assert compare(bundled, piece).drafting_obstacle is None
    assert compare(piece, bundled).drafting_obstacle is None
    obstacle = compare(unigram, level).drafting_obstacle
    assert obstacle is not None
    assert "of the drafter's 320 tokens" in obstacle
    with pytest.raises(ConfigError, match='role "eos"'):
        Alignment.build([bundled, level], "union")
    with pytest.raises(ConfigError, match=r"members 0 and 2.*union instead"):
        Alignment.build([bundled, piece, unigram], "shared")


def test_the_top_k_union_by_hand() -> None:
    logits = torch.tensor([[[4.0, 3.0, 2.0, 1.0]], [[1.0, 2.0, 0.0, 3.0]]])
    expected = torch.tensor([[[4.0, 3.0, -math.inf, 1.0]], [[1.0, 2.0, -math.inf, 3.0]]])
    assert torch.equal(keep_best(logits, 2), expected)
    assert torch.equal(keep_best(logits, 9), logits)
