"""Heads choose with the target's noise, or draw so that rejection sampling gives samples of the target."""

import pytest
import torch

from decoding.drafts.trie import DraftTrie
from decoding.drafts.verification import RejectionRow, Verdict, verify_by_rejection
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import History, Position
from decoding.sampling.params import SamplingParams
from decoding.sampling.sampler import sample
from engine.heads.proposer import DraftStart, HeadSampler
from tests.support.chi_square import count, p_value

VOCAB = 3
TARGET = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
HEADS = torch.tensor([[0.3, 0.3, 0.4], [0.5, 0.2, 0.3], [0.2, 0.6, 0.2]])  # of the next positions
LEAST_P = 1e-8
ROWS, LENGTH = 1500, 61


def test_tokens_are_those_that_the_target_would_choose_from_the_same_logits() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(max_tokens=9, temperature=0),
        SamplingParams(max_tokens=9, temperature=0.9, seed=4),
        SamplingParams(max_tokens=9, temperature=1.2, seed=5, top_k=7),
        SamplingParams(max_tokens=9, temperature=0.7, seed=6, verification="rejection"),
        SamplingParams(max_tokens=9, temperature=0.7, seed=7, top_p=0.6),
    ]
    texts = [list(range(3 + index)) for index in range(5)]
    starts = [DraftStart(index, len(text), each) for index, (text, each) in enumerate(zip(texts, params, strict=True))]
    sampler = HeadSampler(starts, 2, 3, torch.device("cpu"))
    chosen = [sampler.choose(logits), sampler.choose(logits)]
    coupled = [0, 1, 2, 4]
    for step in range(2):
        positions = [Position(History(params[i], texts[i], 1), [0] * step) for i in coupled]
        expected = sample(logits[coupled], SamplingBatch.build(positions, 50))
        assert chosen[step][coupled].tolist() == expected.tolist()
        choices = [choices[step] for choices in sampler.choices()]
        assert [choices[i].tokens[0] for i in range(5)] == chosen[step].tolist()
        assert choices[3].drawn_from is not None
        assert len(choices[1].tokens) == 3


def test_some_tokens_are_drafted_as_if_all_others_were_impossible() -> None:
    ids = torch.arange(4, 50, 3)
    some = torch.randn(3, len(ids), generator=torch.Generator().manual_seed(1))
    every = torch.full((3, 50), -torch.inf).index_copy(1, ids, some)
    params = [SamplingParams(max_tokens=9, temperature=t, seed=3, top_k=5 * index) for index, t in enumerate((0, 1, 2))]
    starts = [DraftStart(index, 4, each) for index, each in enumerate(params)]
    of_all, of_some = (HeadSampler(starts, 1, 3, torch.device("cpu"), known) for known in (None, ids))
    assert torch.equal(of_all.choose(every), of_some.choose(some))
    assert of_all.choices() == of_some.choices()
    rejecting = [DraftStart(0, 4, SamplingParams(max_tokens=9, temperature=1, verification="rejection"))] * 3
    sampler = HeadSampler(rejecting, 1, 3, torch.device("cpu"), ids)
    chosen = sampler.choose(some).tolist()
    assert set(chosen) <= set(ids.tolist())
    for (choice,), token, row in zip(sampler.choices(), chosen, some.softmax(-1), strict=True):
        assert choice.tokens[0] == token
        assert choice.drawn_from is not None
        probability = dict(zip(*choice.drawn_from, strict=True))[token]
        assert probability == pytest.approx(float(row[ids.tolist().index(token)]), rel=1e-4)


class Row:
    """A request under rejection sampling whose only proposer are heads."""

    def __init__(self, seed: int) -> None:
        self.params = SamplingParams(max_tokens=99, temperature=1, seed=seed, verification="rejection")
        self.tokens = [0]
        self.trie = DraftTrie(self.tokens, rejects=True)
        self.after_rejection: list[int] = []

    def commit(self, tokens: list[int], verdict: Verdict) -> None:
        self.trie.commit([*(tokens[index] for index in verdict.path), verdict.own])
        if verdict.rejected:
            self.trie.fence()
            self.after_rejection.append(len(self.tokens))


def step(rows: list[Row], length: int) -> None:
    """Draft three tokens for every row, verify at most `length`, and commit."""
    sampler = HeadSampler([DraftStart(0, len(row.tokens), row.params) for row in rows], 3, 2, torch.device("cpu"))
    for logits in HEADS.log():
        sampler.choose(logits.expand(len(rows), VOCAB))
    for row, choices in zip(rows, sampler.choices(), strict=True):
        tokens = [choice.tokens[0] for choice in choices]
        row.trie.offer(len(row.tokens), tokens, distributions=[choice.drawn_from for choice in choices])
    drafts = [row.trie.best_draft(length, length) for row in rows]
    contexts = [token for row, draft in zip(rows, drafts, strict=True) for token in (row.tokens[-1], *draft.tokens)]
    judged = [RejectionRow(draft, row.params.seed, len(row.tokens)) for row, draft in zip(rows, drafts, strict=True)]
    for row, draft, verdict in zip(rows, drafts, verify_by_rejection(TARGET[contexts], judged), strict=True):
        row.commit(draft.tokens, verdict)


def p_of_pairs(texts: torch.Tensor) -> float:
    """Return the least p-value of token pairs, given the token before. texts: [N, 3]"""
    worst = 1.0
    for before in range(VOCAB):
        pairs = texts[texts[:, 0] == before, 1:]
        expected = (TARGET[before][:, None] * TARGET).flatten()
        worst = min(worst, p_value(count(pairs[:, 0] * VOCAB + pairs[:, 1], VOCAB**2), expected))
    return worst


@pytest.mark.slow
def test_rejection_gives_samples_of_the_target() -> None:
    """Pairs of tokens given the token before, all over the texts and after rejections; false alarm 6e-8."""
    rows = [Row(seed) for seed in range(ROWS)]
    turn = 0
    while active := [row for row in rows if len(row.tokens) <= LENGTH]:
        turn += 1
        step(active, 1 + turn % 3)
    texts = torch.tensor([row.tokens[: LENGTH + 1] for row in rows])
    assert texts[:, 1:].numel() > 90_000
    assert p_of_pairs(texts[:, : LENGTH - LENGTH % 2 + 1].unfold(1, 3, 2).flatten(0, 1)) > LEAST_P
    rejections = [(row, position) for row in rows for position in row.after_rejection if position + 2 <= LENGTH]
    assert len(rejections) > 10_000
    assert p_of_pairs(torch.tensor([row.tokens[position - 1 : position + 2] for row, position in rejections])) > LEAST_P
