"""A member's projected distribution against a slow reference over strings in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer

from decoding.tokenizers.logits_mapping import Projection
from decoding.tokenizers.text_aligner import Speller
from decoding.tokenizers.vocabulary import Vocabulary
from tests.support.permuted import permutation
from tests.support.slow_member import first_tokens
from tests.support.tokenizers import bundled_tokenizer, sentencepiece_tokenizer, speller_of, unigram_tokenizer

PAIRS = [
    (bundled_tokenizer, sentencepiece_tokenizer),
    (sentencepiece_tokenizer, bundled_tokenizer),
    (bundled_tokenizer, unigram_tokenizer),
    (sentencepiece_tokenizer, unigram_tokenizer),
]


def letters(tokens: list[str], *, spaced: bool = False) -> Speller:
    """Make a tokenizer that writes the longest token that fits; the first token ends texts."""
    vocabulary = Vocabulary.build(
        {token: index for index, token in enumerate(tokens)}, control={tokens[0]: "eos"}, convention="sentencepiece"
    )

    def encode(text: str) -> list[int]:
        data, ids = (" " * spaced + text).encode(), []
        while data:
            fitting = [meaning for meaning in vocabulary.ids if isinstance(meaning, bytes) and data.startswith(meaning)]
            token = max(fitting, key=len, default=data[:1])
            ids.append(vocabulary.ids.get(token, 0))
            data = data[len(token) :]
        return ids

    return Speller(vocabulary, encode)


LEADER = letters(["<end>", "a", "b", "ab", "▁", "▁a", "lead"])
MEMBER = letters(["</s>", "b", "a", "abb", "bb", "c", "<0x61>", "aa"])


def test_by_hand() -> None:
    projection = Projection.build(LEADER, MEMBER)
    assert projection.targets.tolist() == [0, 2, 1, 3, 2, -1, 1, 1]
    assert projection.exact.tolist() == [0, 2, 1, -1, -1, -1, -1]
    assert projection.stand_ins.tolist() == [-1, -1, -1, -1, -1, -1, -1]
    probs = torch.tensor([[0.05, 0.1, 0.2, 0.15, 0.05, 0.1, 0.05, 0.3]], dtype=torch.float64)
    projected = projection(probs.log()).exp()
    assert projected[0].tolist() == pytest.approx([0.05, 0.55, 0.15, 0.15, 0, 0, 0])
    assert projection.best(probs.log(), 3) == [[1, 3]]  # aa and a are both written with an a first
    assert projection.best(probs.log(), 99)[0][0] == 1


def test_tokens_that_the_member_lacks_stand_for_how_it_begins_them() -> None:
    member = letters(["</s>", "l", "e", "a", "d", "le"])
    projection = Projection.build(LEADER, member)
    assert projection.stand_ins.tolist() == [-1, -1, -1, 3, -1, -1, 5]
    logits = torch.arange(6.0)[None]
    assert projection(logits)[0].tolist() == [0, 3, *[-math.inf] * 5]
    assert projection(logits, complete=True)[0, 6] == 5


def test_the_space_before_a_text_is_none() -> None:
    leader, member = letters(["<end>", "a", "b", "▁a"], spaced=True), letters(["</s>", "a", "b", " a", "ab"])
    assert (leader.adds_space, member.adds_space) == (True, False)
    first, later = Projection.build(leader, member, fresh=True), Projection.build(leader, member)
    assert first.targets.tolist() == [0, 3, 2, -1, 3]
    assert later.targets.tolist() == [0, 1, 2, 3, 1]
    back = Projection.build(member, leader, fresh=True)
    assert back.targets.tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("leading", "following"), PAIRS)
def test_against_strings(leading: Callable[[], Tokenizer], following: Callable[[], Tokenizer], *, fresh: bool) -> None:
    leader, member = leading(), following()
    projection = Projection.build(speller_of(leader), speller_of(member), fresh=fresh)
    assert projection.targets.tolist() == first_tokens(leader, member, fresh=fresh)
    logits = 3 * torch.randn(3, len(projection.targets), generator=torch.Generator().manual_seed(1))
    total = logits.double().logsumexp(dim=-1, keepdim=True)
    expected = torch.zeros(3, len(projection.exact) + 1, dtype=torch.float64)
    for token, target in enumerate(first_tokens(leader, member, fresh=fresh)):
        expected[:, target] += (logits[:, token].double() - total[:, 0]).exp()
    projected = (projection(logits).double() - total).exp()
    torch.testing.assert_close(projected, expected[:, :-1], rtol=1e-5, atol=1e-12)
    first = first_tokens(member, leader, fresh=fresh)
    texts = {token: text for text, token in leader.get_vocab().items()}
    for token in (expected[0, :-1] == 0).nonzero().flatten().tolist():
        if len(set(texts[token])) == 1:  # a unigram model has several equally good spellings of a run
            continue
        alone = logits[:, first[token]] if first[token] >= 0 else torch.full((3,), -math.inf)
        assert torch.equal(projection(logits, complete=True)[:, token], alone)


def test_another_order_moves_logits_and_nothing_else() -> None:
    bundled = speller_of(bundled_tokenizer())
    order = permutation(bundled.vocabulary.size)
    meanings = [bundled.vocabulary.meanings[token] for token in order.argsort().tolist()]
    ids = {meaning: int(order[index]) for meaning, index in bundled.vocabulary.ids.items()}
    turned = Speller(Vocabulary(tuple(meanings), ids, "byte_level"), lambda text: order[bundled.encode(text)].tolist())
    projection = Projection.build(bundled, turned)
    assert not len(projection.others)
    logits = torch.randn(5, bundled.vocabulary.size, generator=torch.Generator().manual_seed(1))
    moved = torch.empty_like(logits)
    moved[:, order] = logits
    assert torch.equal(projection(moved), logits)
    assert torch.equal(projection(moved, complete=True), logits)
    assert projection.best(moved, 4) == logits.topk(4).indices.tolist()
