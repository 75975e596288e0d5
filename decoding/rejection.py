"""Rejection sampling: drafts that were drawn from one distribution become samples of another (docs/verification.md).

The classical rule accepts a draft token with probability min(1, target/draft), and otherwise samples from
norm(max(0, target − draft)) (Leviathan et al., arXiv 2211.17192, section 2.3; Chen et al., arXiv 2302.01318, alg. 2).
Where nothing branches, tokens are verified together, which accepts more (Sun et al., arXiv 2403.10444, algorithm 2).
Siblings are tried in the order of their draw without replacement, against what the ones before have left of both
distributions (Sequoia, arXiv 2402.12374, algorithm 2). A token that was not drawn is one drawn from a distribution that
has no other: it is accepted with the target's probability.

Draft distributions are sparse, so all but gathering and the last sample is arithmetic on few numbers, done on the host
in float64. It knows nothing of greedy requests, which compare argmax with argmax (decoding/verify.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from decoding.drafts import Distribution, Draft
from decoding.noise import ACCEPTANCE, OWN_TOKENS, draft_stream, gumbel, noise_key, uniform
from decoding.transfer import copy_to, tensor_on


@dataclass(frozen=True, slots=True)
class RejectionRow:
    """A draft to verify, with what the noise depends on."""

    draft: Draft  # [K]
    seed: int
    position: int  # absolute, of its first token


class Verdict(NamedTuple):
    """What a row commits: the draft's tokens at `path`, then its own."""

    path: list[int]  # the places of the accepted tokens, top down
    own: int
    rejected: bool  # whether a draft token was; then the row's trie and its drafter begin anew (docs/verification.md)


def draft_key(seed: int, position: int, fence: int) -> tuple[int, int]:
    """The noise key of a drafter that began anew when the text was `fence` tokens long."""
    return noise_key(seed, position, draft_stream(fence))


def draw(logits: Tensor, keys: Tensor, top_k: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """A drafter's draw without replacement from its renormalised top k.

    Args:
        logits: [S, V] processed, −∞ for what the target does not have.
        keys: [S, 2] int32, `draft_key`s.
        top_k: k; V if that is less.

    Returns:
        [S] int64 samples; [S, k] int64 tokens in the order of the draw, these first (Gumbel top-k: Kool et al., arXiv
        1903.06059); [S, k] float32 the probabilities that they were drawn with, zeros last.
    """
    best = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)
    probs = best.values.softmax(dim=-1)
    scores = probs.log().add_(gumbel(keys, logits.shape[-1]).gather(-1, best.indices))
    order = scores.argsort(dim=-1, descending=True)
    tokens = best.indices.gather(-1, order)
    return tokens[:, 0], tokens, probs.gather(-1, order)


def distributions(tokens: Tensor, probs: Tensor) -> list[Distribution]:
    """[S] the tokens and probabilities of `draw`, both [S, k], on the host and without zeros."""
    counts = (probs > 0).sum(dim=-1).tolist()
    pairs = zip(tokens.tolist(), probs.tolist(), counts, strict=True)
    return [Distribution(ids[:count], of_row[:count]) for ids, of_row, count in pairs]


def verify_by_rejection(probs: Tensor, rows: Sequence[RejectionRow], *, block: bool = True) -> list[Verdict]:
    """Samples of the target's distribution that follow the drafts as far as the rule allows.

    Waits for the device twice.

    Args:
        probs: [N, V] the target's, processed: after each row's text, then after each of its draft tokens; K + 1 a row.
        rows: [B]
        block: verify the tokens between two branchings together; otherwise each by itself.
    """
    trees = [_Tree(row.draft, block=block) for row in rows]
    starts = [0, *accumulate(len(row.draft.tokens) + 1 for row in rows)]
    _gather(probs, trees, starts)
    for tree in trees:
        tree.weigh()
    for tree, excess in zip(trees, _excess(trees), strict=True):
        tree.judge(excess)
    longest = max((len(row.draft.tokens) for row in rows), default=0)
    uniforms = uniform(_keys([(row.seed, row.position, ACCEPTANCE) for row in rows]), longest).tolist()
    outcomes = [tree.walk(of_row) for tree, of_row in zip(trees, uniforms, strict=True)]
    own = _sample_own(probs, rows, outcomes, starts)
    return [Verdict(outcome.path, token, outcome.rejected) for outcome, token in zip(outcomes, own, strict=True)]


@dataclass(slots=True, eq=False)
class _Place:
    """A draft token: what it was drawn from, after the draws of its elder siblings, and what decides on it."""

    tokens: list[int]  # itself first
    draft_probs: list[float]  # of these
    target_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # of these; float64, on the host
    ratio: float = 0.0  # of its own two
    weight: float = 1.0  # what verification has left of the target above: p of the parent in arXiv 2403.10444
    left: float = 1.0  # what it leaves here: p there
    probability: float = 1.0  # to be accepted whatever is behind it: h there

    def rest(self) -> tuple[Sequence[int], Sequence[float]]:
        """What its rejection leaves of the target for the tokens that it might have been."""
        left = self.target_probs - torch.tensor(self.draft_probs, dtype=torch.float64) / self.weight
        values: list[float] = left.clamp_(min=0).tolist()
        return self.tokens, values


class _Outcome(NamedTuple):
    """What a row accepts, and what its own token is then drawn from."""

    path: list[int]
    rejected: bool
    rest: tuple[Sequence[int], Sequence[float]] = ((), ())  # weights of some tokens; all others keep the target's


class _Tree:
    """The draft tokens of one row."""

    def __init__(self, draft: Draft, *, block: bool) -> None:
        self._parents = draft.parents
        self._block = block
        self._below = draft.children()
        drawn_from = draft.distributions or [None] * len(draft.tokens)
        self.places = [_place(token, origin) for token, origin in zip(draft.tokens, drawn_from, strict=True)]

    def rows(self, start: int) -> list[int]:
        """Which rows of the target's probabilities the tokens are verified with, given the first of them."""
        return [start + parent + 1 for parent in self._parents]

    def weigh(self) -> None:
        """How much of the target is left at every token, top down."""
        for number, place in enumerate(self.places):
            if self._continues(number):
                place.weight = self.places[self._parents[number]].left
            place.left = place.probability = min(1.0, place.weight * place.ratio)

    def judge(self, excess: Sequence[float]) -> None:
        """The probability of every token that others are verified together with. excess: [K] as `_excess` finds it."""
        for number, above_it in enumerate(excess):
            if self._continues(number):
                above = self.places[self._parents[number]]
                room = above_it + 1 - above.left
                above.probability = above_it / room if room > 0 else 1.0

    def _continues(self, number: int) -> bool:
        """Whether a token is verified together with its parent."""
        parent = self._parents[number]
        return self._block and parent >= 0 and self._is_alone(number) and self._is_alone(parent)

    def _is_alone(self, number: int) -> bool:
        return len(self._below[self._parents[number] + 1]) == 1

    def walk(self, uniforms: Sequence[float]) -> _Outcome:
        """Accept from the text down; uniforms: [K or more], one for each place."""
        path: list[int] = []
        while below := self._below[path[-1] + 1 if path else 0]:
            accepted, rejected, rest = self._try(below, uniforms)
            path += accepted
            if rejected:
                return _Outcome(path, True, rest)
        return _Outcome(path, False)

    def _try(self, below: list[int], uniforms: Sequence[float]) -> _Outcome:
        """The siblings at a branching, one after the other, or the tokens up to the next one, together."""
        if len(below) > 1:
            return self._try_siblings(below, uniforms)
        run = list(below)
        while len(self._below[run[-1] + 1]) == 1 and self._continues(self._below[run[-1] + 1][0]):
            run += self._below[run[-1] + 1]
        count = max(
            (i for i, number in enumerate(run, start=1) if uniforms[number] < self.places[number].probability),
            default=0,
        )
        if count == len(run):
            return _Outcome(run, False)
        return _Outcome(run[:count], True, self.places[run[count]].rest())

    def _try_siblings(self, below: list[int], uniforms: Sequence[float]) -> _Outcome:
        rest = _Rest()
        for number in below:
            place = self.places[number]
            if uniforms[number] * place.draft_probs[0] < rest.of(place.tokens[0], place.ratio * place.draft_probs[0]):
                return _Outcome([number], False)
            rest.take(place)
        return _Outcome([], True, rest.weights())


class _Rest:
    """What siblings' rejections leave of the target: other values for some tokens, a common factor for all others."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._values: dict[int, float] = {}
        self._outside = 1.0  # the target's probability of all others

    def of(self, token: int, target_prob: float) -> float:
        return self._values.get(token, self._scale * target_prob)

    def take(self, place: _Place) -> None:
        """Subtract what a token was drawn from, and normalise."""
        target_probs = place.target_probs.tolist()
        for token, draft_prob, target_prob in zip(place.tokens, place.draft_probs, target_probs, strict=True):
            if token not in self._values:
                self._outside -= target_prob
            self._values[token] = max(0.0, self.of(token, target_prob) - draft_prob)
        total = sum(self._values.values()) + self._scale * max(0.0, self._outside)
        if total > 0:
            self._scale /= total
            self._values = {token: value / total for token, value in self._values.items()}

    def weights(self) -> tuple[Sequence[int], Sequence[float]]:
        """Tokens and their weights, in proportion to the target's probabilities of all others."""
        return list(self._values), [value / self._scale for value in self._values.values()]


def _place(token: int, drawn_from: Distribution | None) -> _Place:
    if drawn_from is None:
        return _Place([token], [1.0])
    rank = drawn_from.tokens.index(token)
    if rank == 0:
        return _Place(*drawn_from)
    remaining = drawn_from.probabilities[rank:]
    total = sum(remaining)
    return _Place(drawn_from.tokens[rank:], [probability / total for probability in remaining])


def _gather(probs: Tensor, trees: Sequence[_Tree], starts: Sequence[int]) -> None:
    """Fetch the target's probabilities of all tokens that any draft token was drawn from."""
    places = [place for tree in trees for place in tree.places]
    rows = [row for tree, start in zip(trees, starts, strict=False) for row in tree.rows(start)]
    counts = [len(place.tokens) for place in places]
    index = torch.tensor(rows, dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    tokens = torch.tensor([token for place in places for token in place.tokens], dtype=torch.int64)
    found = probs[copy_to(probs.device, index), copy_to(probs.device, tokens)].cpu().double()
    found.nan_to_num_(0.0)  # where a grammar allows nothing, behind a token that it forbids
    for place, target_probs in zip(places, found.split(counts), strict=True):
        place.target_probs = target_probs
    firsts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64)[:-1]
    for place, own in zip(places, found[firsts].tolist(), strict=True):
        place.ratio = own / place.draft_probs[0]


def _excess(trees: Sequence[_Tree]) -> list[list[float]]:
    """[B][K] by how much what is left of the target exceeds the draft where it does: S in arXiv 2403.10444."""
    places = [place for tree in trees for place in tree.places]
    if not places:
        return [[] for _ in trees]
    counts = torch.tensor([len(place.tokens) for place in places])
    owners = torch.arange(len(places)).repeat_interleave(counts)  # [F]
    weights = torch.tensor([place.weight for place in places], dtype=torch.float64)
    target = torch.cat([place.target_probs for place in places]) * weights[owners]  # [F]
    draft = torch.tensor([prob for place in places for prob in place.draft_probs], dtype=torch.float64)
    outside = weights.index_add(0, owners, -target).clamp_(min=0)
    excess = iter(outside.index_add_(0, owners, (target - draft).clamp_(min=0)).tolist())
    return [list(islice(excess, len(tree.places))) for tree in trees]


def _sample_own(
    probs: Tensor, rows: Sequence[RejectionRow], outcomes: Sequence[_Outcome], starts: Sequence[int]
) -> list[int]:
    """[B] a token of each row's own, from what its rejections left. probs: [N, V]."""
    ends = [outcome.path[-1] + 1 if outcome.path else 0 for outcome in outcomes]
    chosen = torch.tensor([start + end for start, end in zip(starts, ends, strict=False)], dtype=torch.int64)
    target = probs[copy_to(probs.device, chosen)].float()  # [B, V]
    index = [(row, token) for row, outcome in enumerate(outcomes) for token in outcome.rest[0]]
    values = tensor_on(probs.device, [value for outcome in outcomes for value in outcome.rest[1]], torch.float32)
    at_rows, tokens = tensor_on(probs.device, index, torch.int64).reshape(-1, 2).unbind(-1)
    rest = target.index_put((at_rows, tokens), values)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)  # nothing is left only if rounding rejected
    keys = _keys([(row.seed, row.position + len(o.path), OWN_TOKENS) for row, o in zip(rows, outcomes, strict=True)])
    own: list[int] = rest.log_().add_(gumbel(copy_to(probs.device, keys), probs.shape[-1])).argmax(dim=-1).tolist()
    return own


def _keys(noises: Sequence[tuple[int, int, int]]) -> Tensor:
    """[N, 2] int32 from seeds, positions and streams."""
    return torch.tensor([noise_key(*noise) for noise in noises], dtype=torch.int32).reshape(-1, 2)
