"""Masks computed in threads equal those of the states."""

import torch

from decoding.drafts.draft import Draft
from decoding.grammars.mask_threads import MaskThreads
from tests.support.structures import NO_DRAFT, VOCAB_SIZE, Drafts, Writer, compiled, follow


def test_each_row_gets_its_own_masks() -> None:
    word = compiled("regex", "[a-z ]{3,40}")
    grammars = [word, compiled("json", "{}"), word, compiled("grammar", 'start: ("a" | "b" "c")*')]
    threads = MaskThreads(3)
    try:
        for seed in range(20):
            answers = [Writer(seed, greedy=False).write(grammar, limit=6)[:-1] for grammar in grammars]
            drafts = [Drafts(answer, seed).draft(2) for answer in answers]
            states, others = (
                [follow(grammar, answer[:2]) for grammar, answer in zip(grammars, answers, strict=True)]
                for _ in range(2)
            )
            masks = threads.start([None, *states, None], [NO_DRAFT, *drafts, NO_DRAFT])()
            assert masks[0] is masks[-1] is None
            for mask, other, draft in zip(masks[1:-1], others, drafts, strict=True):
                assert mask is not None
                assert torch.equal(mask, other.masks(draft))
    finally:
        threads.close()


def test_a_step_without_structures_starts_nothing() -> None:
    threads = MaskThreads(1)
    threads.close()
    assert threads.start([None, None], [Draft([1], [-1]), NO_DRAFT])() == [None, None]


def test_masks_are_as_wide_as_the_logits() -> None:
    threads = MaskThreads()
    try:
        (mask,) = threads.start([follow(compiled("json", "{}"), [])], [NO_DRAFT])()
        assert mask is not None
        assert mask.shape == (1, VOCAB_SIZE // 32)
    finally:
        threads.close()
