"""Coupled verification against a plain loop, and rejection sampling against the formulas of the papers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decoding.drafts.draft import Distribution, Draft
from decoding.drafts.verification import (
    RejectionRow,
    Verdict,
    accepted_path,
    distributions,
    draft_key,
    draw,
    verify_by_rejection,
)
from decoding.sampling.noise import gumbel, uniform
from decoding.sampling.noise_keys import ACCEPTANCE, noise_key
from tests.support.properties import repeatable

VOCAB = 6


def key_tensor(*keys: tuple[int, int]) -> Tensor:
    return torch.tensor(keys, dtype=torch.int32)


def dense(distribution: Distribution | None, token: int) -> Tensor:
    """Return the distribution of a draft token, [V] float64."""
    ids, probs = distribution or ([token], [1.0])
    return torch.zeros(VOCAB, dtype=torch.float64).index_add_(0, torch.tensor(ids), torch.tensor(probs).double())


class PlainRow:
    """Verifies one row token by token. It shares only the noise with the code under test."""

    def __init__(self, row: RejectionRow, probs: Tensor) -> None:
        """probs: [K + 1, V]"""
        self.draft, self.target = row.draft, probs.double()
        self.u = uniform(key_tensor(noise_key(row.seed, row.position, ACCEPTANCE)), 64)[0].tolist()
        self.row = row
        self.drawn_from = [dense(d, t) for t, d in zip(row.draft.tokens, row.draft.distributions, strict=True)]

    def own(self, residual: Tensor, accepted: int) -> int:
        noise = gumbel(key_tensor(noise_key(self.row.seed, self.row.position + accepted)), VOCAB)[0]
        return int((residual.log() + noise).argmax())

    def children(self, last: int) -> list[int]:
        return [index for index, parent in enumerate(self.draft.parents) if parent == last]

    def block(self) -> Verdict:
        """Verify a chain: algorithm 2 of arXiv 2403.10444."""
        remaining, count, residual = 1.0, 0, (self.target[0] - self.drawn_from[0]).clamp(min=0)
        for i, token in enumerate(self.draft.tokens, start=1):
            remaining = min(remaining * float(self.target[i - 1, token] / self.drawn_from[i - 1][token]), 1.0)
            probability = remaining
            if i < len(self.draft.tokens):
                excess = (remaining * self.target[i] - self.drawn_from[i]).clamp(min=0)
                probability = (
                    float(excess.sum() / (excess.sum() + 1 - remaining)) if excess.sum() > 0 or remaining < 1 else 1.0
                )
            if self.u[i - 1] < probability:
                count, residual = i, self.target[i] if i == len(self.draft.tokens) else excess
        return Verdict(list(range(count)), self.own(residual, count), count < len(self.draft.tokens))

    def classical(self) -> Verdict:
        """Verify siblings one by one, each against the residual of the draft's distribution."""
        path: list[int] = []
        last = -1
        while below := self.children(last):
            target, drawn = self.target[last + 1], None
            for index in below:
                token = self.draft.tokens[index]
                source = self.drawn_from[index] if drawn is None or self.draft.distributions[index] is None else drawn
                source = source / source.sum()
                if self.u[index] < float(target[token] / source[token]):
                    path.append(index)
                    last = index
                    break
                target = (target - source).clamp(min=0)
                target = target / target.sum()
                drawn = source.clone()
                drawn[token] = 0
            else:
                return Verdict(path, self.own(target, len(path)), True)
        return Verdict(path, self.own(self.target[last + 1], len(path)), False)


@st.composite
def rows(draw_: st.DrawFn, *, chain: bool) -> tuple[RejectionRow, Tensor]:
    """Make a draft of tokens that were drawn or not, and [K + 1, V] target probabilities, some of them 0."""
    generator = torch.Generator().manual_seed(draw_(st.integers(0, 2**32)))
    k = draw_(st.integers(1, 5))
    seed = draw_(st.integers(0, 2**40))
    parents = [index - 1 if chain else draw_(st.integers(-1, index - 1)) for index in range(k)]
    tokens: list[int] = []
    origins: list[Distribution | None] = []
    for parent in dict.fromkeys(parents):
        count = parents.count(parent)
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        _, ids, probs = draw(logits, key_tensor(draft_key(seed, 50 + parent, 9)), max(count, draw_(st.integers(1, 6))))
        drawn = draw_(st.booleans())
        for rank in range(count):
            tokens.append(int(ids[0, rank]))
            origins.append(distributions(ids, probs)[0] if drawn else None)
    order = sorted(range(k), key=lambda index: list(dict.fromkeys(parents)).index(parents[index]))
    new_index = {index: new for new, index in enumerate(order)}
    draft = Draft(
        [tokens[new_index[index]] for index in range(k)],
        parents,
        [],
        [origins[new_index[index]] for index in range(k)],
    )
    logits = torch.randn(k + 1, VOCAB, generator=generator) * 2
    logits[torch.rand(k + 1, VOCAB, generator=generator) < 0.2] = -torch.inf
    logits[:, 0] = 0
    return RejectionRow(draft, seed, 17), logits.softmax(-1)


@repeatable
@given(rows(chain=True))
def test_a_chain_is_verified_as_a_block(case: tuple[RejectionRow, Tensor]) -> None:
    row, probs = case
    assert verify_by_rejection(probs, [row]) == [PlainRow(row, probs).block()]


@repeatable
@given(rows(chain=False))
def test_trees_are_verified_sibling_by_sibling(case: tuple[RejectionRow, Tensor]) -> None:
    row, probs = case
    assert verify_by_rejection(probs, [row], block=False) == [PlainRow(row, probs).classical()]


@repeatable
@given(st.lists(st.booleans().flatmap(lambda chain: rows(chain=chain)), max_size=5), st.booleans())
def test_rows_do_not_see_each_other(cases: list[tuple[RejectionRow, Tensor]], block: bool) -> None:
    alone = [verify_by_rejection(probs, [row], block=block)[0] for row, probs in cases]
    probs = torch.cat([torch.empty(0, VOCAB), *(probs for _, probs in cases)])
    assert verify_by_rejection(probs, [row for row, _ in cases], block=block) == alone


def test_without_a_draft_the_token_is_the_one_of_plain_decoding() -> None:
    probs = torch.rand(20, VOCAB).softmax(-1)
    keys = key_tensor(*(noise_key(seed, 30) for seed in range(20)))
    expected = (probs.log() + gumbel(keys, VOCAB)).argmax(-1).tolist()
    verdicts = verify_by_rejection(probs, [RejectionRow(Draft([], []), seed, 30) for seed in range(20)])
    assert verdicts == [Verdict([], token, rejected=False) for token in expected]


@pytest.mark.parametrize("block", [True, False])
def test_a_drafter_like_the_target_is_always_accepted(block: bool) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    for seed in range(200):
        keys = key_tensor(*(draft_key(seed, position, 10) for position in (10, 11)))
        tokens, ids, probs = draw(logits[:2], keys)
        draft = Draft(tokens.tolist(), [-1, 0], [], [*distributions(ids, probs)])
        verdict = verify_by_rejection(logits.softmax(-1), [RejectionRow(draft, seed, 10)], block=block)[0]
        assert (verdict.path, verdict.rejected) == ([0, 1], False)


def test_an_impossible_token_is_never_accepted_nor_drawn() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5], [1.0, 0.0, 0.0]])
    for seed in range(100):
        for origin in (None, Distribution([0, 1], [0.9, 0.1])):
            verdict = verify_by_rejection(probs, [RejectionRow(Draft([0], [-1], [], [origin]), seed, 4)])[0]
            assert verdict.rejected
            assert verdict.own in (1, 2)


def test_what_follows_an_impossible_token_does_not_matter() -> None:
    """After a token that a grammar forbids, nothing may be allowed."""
    probs = torch.tensor([[0.0, 0.5, 0.5], [torch.nan] * 3, [torch.nan] * 3])
    for seed in range(100):
        verdict = verify_by_rejection(probs, [RejectionRow(Draft([0, 1], [-1, 0]), seed, 4)])[0]
        assert (verdict.path, verdict.rejected) == ([], True)
        assert verdict.own in (1, 2)


def test_a_draw_is_sparse_and_in_order() -> None:
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 1.0, 2.0], [0.0, -torch.inf, -torch.inf, -torch.inf, 1.0]])
    tokens, ids, probs = draw(logits, key_tensor(draft_key(1, 2, 3), draft_key(4, 5, 6)), 3)
    drawn_from = distributions(ids, probs)
    assert tokens.tolist() == [origin.tokens[0] for origin in drawn_from]
    assert sorted(drawn_from[0].tokens) == [1, 3, 4]
    assert sorted(drawn_from[1].tokens) == [0, 4]
    for row, origin in zip(logits, drawn_from, strict=True):
        expected = row[origin.tokens].softmax(-1).tolist()
        assert origin.probabilities == pytest.approx(expected)
        assert origin.is_sound


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Draw the target's tokens [B][K + 1], drafts [B][K] and their lengths; few tokens, so that many agree."""
    rows, k = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    tokens = st.integers(0, 2)
    sampled = draw(st.lists(st.lists(tokens, min_size=k + 1, max_size=k + 1), min_size=rows, max_size=rows))
    drafts = draw(st.lists(st.lists(tokens, min_size=k, max_size=k), min_size=rows, max_size=rows))
    return sampled, drafts, draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))


def accepted_by_loop(sampled: list[int], draft: list[int]) -> int:
    accepted = 0
    for chosen, drafted in zip(sampled, draft, strict=False):
        if chosen != drafted:
            break
        accepted += 1
    return accepted


@repeatable
@given(batches())
def test_a_chain_is_a_tree_with_one_branch(batch: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    for row, draft, length in zip(*batch, strict=True):
        accepted = accepted_by_loop(row, draft[:length])
        path, disagrees = accepted_path(row, Draft(draft[:length], list(range(-1, length - 1))))
        assert path == list(range(accepted))
        assert disagrees == (accepted < length)


@repeatable
@given(st.data())
def test_trees(data: st.DataObject) -> None:
    """Compare with a walk from the text down, over trees whose siblings differ."""
    parents: list[int] = []
    tokens: list[int] = []
    for index in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.integers(-1, index - 1))
        siblings = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        parents.append(parent)
        tokens.append(next(token for token in range(9) if token not in siblings))
    sampled = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    expected: list[int] = []
    while True:
        last = expected[-1] if expected else -1
        children = [index for index, parent in enumerate(parents) if parent == last]
        chosen = [index for index in children if tokens[index] == sampled[last + 1]]
        if not chosen:
            break
        expected += chosen
    assert accepted_path(sampled, Draft(tokens, parents)) == (expected, bool(children))
