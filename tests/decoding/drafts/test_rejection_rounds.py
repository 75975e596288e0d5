"""Many steps of rejection sampling with a drafter that runs ahead: drafts that survive a verdict cause no bias.

The models are Markov chains over three tokens. There are more than 200 000 draws, with fixed seeds.
"""

from itertools import islice

import pytest
import torch
from torch import Tensor

from decoding.drafts.draft import Distribution
from decoding.drafts.trie import DraftTrie
from decoding.drafts.verification import RejectionRow, Verdict, distributions, draft_key, draw, verify_by_rejection
from tests.support.chi_square import count, p_value

VOCAB = 3
TARGET = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
DRAFTER = torch.tensor([[0.3, 0.3, 0.4]] * VOCAB)  # the same noise gives the same token, whatever comes before
LEAST_P = 1e-8
ROWS, LENGTH = 1500, 81
LOOK_UP = [1, 2, 0]  # the token drafted by look-up after each token


class Row:
    """A request with its trie and its drafter, which is ahead of the text by a chain."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.tokens = [0]
        self.trie = DraftTrie(self.tokens, rejects=True)
        self.ahead: list[tuple[int, Distribution]] = []
        self.fence = 1
        self.after_rejection: list[int] = []  # positions

    def tip(self) -> int:
        return self.ahead[-1][0] if self.ahead else self.tokens[-1]

    def key(self) -> tuple[int, int]:
        """Return the noise key of the drafter's next draw."""
        return draft_key(self.seed, len(self.tokens) + len(self.ahead), self.fence)

    def offer(self, known: int) -> None:
        """Offer all tokens ahead. known: the number of tokens whose distributions were offered before."""
        origins = [([], []) if index < known else origin for index, (_, origin) in enumerate(self.ahead)]
        tokens = [token for token, _ in self.ahead]
        assert not tokens or self.trie.offer(len(self.tokens), tokens, distributions=origins)

    def commit(self, tokens: list[int], verdict: Verdict) -> None:
        committed = [*(tokens[index] for index in verdict.path), verdict.own]
        self.trie.commit(committed)
        if verdict.rejected:
            self.trie.fence()
            self.ahead, self.fence = [], len(self.tokens)
            self.after_rejection.append(len(self.tokens))
        elif [token for token, _ in islice(self.ahead, len(committed))] == committed:
            self.ahead = self.ahead[len(committed) :]
        else:
            self.ahead = []


def run_ahead(rows: list[Row], count: int) -> None:
    """Draft `count` more tokens for every row."""
    for _ in range(count):
        keys = torch.tensor([row.key() for row in rows], dtype=torch.int32)
        tokens, ids, probs = draw(DRAFTER[[row.tip() for row in rows]].log(), keys, 2)
        for row, token, origin in zip(rows, tokens.tolist(), distributions(ids, probs), strict=True):
            row.ahead.append((token, origin))


def step(rows: list[Row], length: int) -> None:
    """Verify at most `length` draft tokens of every row, and commit."""
    drafts = [row.trie.best_draft(length, length) for row in rows]
    contexts = [token for row, draft in zip(rows, drafts, strict=True) for token in (row.tokens[-1], *draft.tokens)]
    judged = [RejectionRow(draft, row.seed, len(row.tokens)) for row, draft in zip(rows, drafts, strict=True)]
    for row, draft, verdict in zip(rows, drafts, verify_by_rejection(TARGET[contexts], judged), strict=True):
        row.commit(draft.tokens, verdict)


def simulate() -> list[Row]:
    """Generate texts with drafts and lookaheads of changing lengths, some looked up, and steps without drafts."""
    rows = [Row(seed) for seed in range(ROWS)]
    turn = 0
    while active := [row for row in rows if len(row.tokens) <= LENGTH]:
        turn += 1
        known = [len(row.ahead) for row in active]
        if turn % 8:
            run_ahead([row for row in active if len(row.ahead) < 6], 2 + turn % 3)
        for row, before in zip(active, known, strict=True):
            row.offer(before)
            row.trie.offer(len(row.tokens), [LOOK_UP[row.tokens[-1]], 1], probabilities=[0.9, 0.9])
        step(active, 2 + turn % 4)
    return rows


def p_of_pairs(texts: Tensor) -> float:
    """Return the least p-value of token pairs, given the token before. texts: [N, 3]"""
    worst = 1.0
    for before in range(VOCAB):
        pairs = texts[texts[:, 0] == before, 1:]
        expected = (TARGET[before][:, None] * TARGET).flatten()
        worst = min(worst, p_value(count(pairs[:, 0] * VOCAB + pairs[:, 1], VOCAB**2), expected))
    return worst


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return simulate()


@pytest.mark.slow
def test_every_position_is_a_sample(rows: list[Row]) -> None:
    """Pairs of tokens given the token before, all over the texts; false alarm 3e-8."""
    texts = torch.tensor([row.tokens[: LENGTH + 1] for row in rows])
    assert texts[:, 1:].numel() > 120_000  # and each verified draft token is one more draw
    assert p_of_pairs(texts[:, : LENGTH - LENGTH % 2 + 1].unfold(1, 3, 2).flatten(0, 1)) > LEAST_P


def test_what_follows_a_rejection_is_a_sample(rows: list[Row]) -> None:
    """The two tokens after each recovered one; false alarm 3e-8."""
    rejections = [(row, position) for row in rows for position in row.after_rejection if position + 2 <= LENGTH]
    assert len(rejections) > 20_000
    assert p_of_pairs(torch.tensor([row.tokens[position - 1 : position + 2] for row, position in rejections])) > LEAST_P
