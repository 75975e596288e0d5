"""The rules by which a target accepts draft tokens: coupled sampling, and rejection sampling.

Coupled: the target samples its own token at every position of the draft, and accepts the draft tokens that equal them
(Daliri et al., arXiv 2408.07978). Greedy verification is the same rule without noise.

Rejection (docs/verification.md): a draft token is accepted with probability min(1, target/draft), else a token of
norm(max(0, target − draft)) replaces it (Leviathan et al., arXiv 2211.17192, section 2.3; Chen et al., arXiv
2302.01318, alg. 2). Chains are verified as a block, which accepts more (Sun et al., arXiv 2403.10444, algorithm 2).
Siblings are tried in the order of their draw without replacement, against the residuals of both distributions (Sequoia,
arXiv 2402.12374, algorithm 2). A token that was not drawn counts as drawn with probability 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from decoding.drafts.draft import Distribution, Draft
from decoding.sampling.logprobs import TokenLogprobs
from decoding.sampling.noise import gumbel, uniform
from decoding.sampling.noise_keys import ACCEPTANCE, OWN_TOKENS, draft_stream, noise_key
from decoding.sampling.sampler import NO_TOKEN
from decoding.sampling.transfer import copy_to, tensor_on

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RejectionRow:
    """A draft to verify, and the seed and position of its noise."""

    draft: Draft  # [K]
    seed: int
    position: int  # absolute, of its first token


class Verdict(NamedTuple):
    """What a row commits: accepted draft tokens, and one of the target's own."""

    path: list[int]  # indices of the accepted tokens in the draft, top down
    own: int
    rejected: bool  # whether the own token replaces a rejected draft token; then trie and drafter restart
    logprobs: list[TokenLogprobs] | None = None  # of all these tokens, if wanted
    error: str | None = None  # why nothing can be committed

    def logits_rows(self) -> list[int]:
        """Return the row of the step's K + 1 logits that each committed token was chosen from."""
        return [0, *[index + 1 for index in self.path]]

    def accepted(self, values: list[Value]) -> list[Value]:
        """Return those of the accepted draft tokens. values: [K]"""
        count = len(self.path)
        if not count or self.path[-1] == count - 1:  # the draft's first
            return values[:count]
        return [values[index] for index in self.path]

    def tokens(self, draft: Draft) -> list[int]:
        return [*self.accepted(draft.tokens), self.own] if self.path else [self.own]


def accepted_path(sampled: Sequence[int], draft: Draft) -> tuple[list[int], bool]:
    """Return the indices of accepted draft tokens, top down, and whether one was rejected after them.

    The row commits them, then sampled[last index + 1].

    sampled: [K + 1] the target's tokens: after the text, then after each draft token.
    """
    path: list[int] = []
    last = -1
    rejected = False
    for index, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if parent != last:
            continue
        rejected = token != sampled[last + 1]
        if not rejected:
            path.append(index)
            last = index
    return path, rejected


def draft_key(seed: int, position: int, fence: int) -> tuple[int, int]:
    """Return the noise key of a drafter that last restarted when the text was `fence` tokens long."""
    return noise_key(seed, position, draft_stream(fence))


def draw(
    logits: Tensor, keys: Tensor, top_k: int = 64, token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw without replacement from a drafter's renormalised top k.

    Args:
        logits: [S, V] processed, −∞ for tokens that the target lacks.
        keys: [S, 2] int32, `draft_key`s.
        top_k: k; V if that is less.
        token_ids: [V] int64, the tokens that the logits are of; None: 0…V−1.

    Returns:
        [S] int64 samples; [S, k] int64 tokens in the order of the draw, the sample first (Gumbel top-k: Kool et al.,
        arXiv 1903.06059); [S, k] float32 their probabilities, zeros last.
    """
    best = logits.float().topk(min(top_k, logits.shape[-1]), dim=-1)
    probs = best.values.softmax(dim=-1).nan_to_num_(1 / best.values.shape[-1])  # of NaNs any draft will do
    ids = best.indices if token_ids is None else token_ids[best.indices]
    scores = probs.log().add_(gumbel(keys, ids))
    order = scores.argsort(dim=-1, descending=True)
    tokens = ids.gather(-1, order)
    return tokens[:, 0], tokens, probs.gather(-1, order)


def distributions(tokens: Tensor, probs: Tensor) -> list[Distribution]:
    """Return the tokens and probabilities of `draw`, both [S, k], on the host and without zeros, [S]."""
    counts = (probs > 0).sum(dim=-1).tolist()
    pairs = zip(tokens.tolist(), probs.tolist(), counts, strict=True)
    return [Distribution(ids[:count], row_probs[:count]) for ids, row_probs, count in pairs]


def verify_by_rejection(probs: Tensor, rows: Sequence[RejectionRow], *, block: bool = True) -> list[Verdict]:
    """Verify drafts of B rows, so that committed tokens are samples of the target's distribution. Waits twice.

    probs: [N, V] the target's, processed: for each row after its text, then after each of its K draft tokens.
    block: verify the tokens between two branchings as a block; otherwise each by itself.
    """
    trees = [_Tree(row.draft, block=block) for row in rows]
    starts = [0, *accumulate(len(row.draft.tokens) + 1 for row in rows)]
    _gather(probs, trees, starts)
    for tree in trees:
        tree.compute_weights()
    for tree, excess in zip(trees, _excess(trees), strict=True):
        tree.apply_excess(excess)
    longest = max((len(row.draft.tokens) for row in rows), default=0)
    uniforms = uniform(_keys([(row.seed, row.position, ACCEPTANCE) for row in rows]), longest).tolist()
    outcomes = [tree.accept(row_uniforms) for tree, row_uniforms in zip(trees, uniforms, strict=True)]
    own = _sample_own(probs, rows, outcomes, starts)
    return [Verdict(outcome.path, token, outcome.rejected) for outcome, token in zip(outcomes, own, strict=True)]


@dataclass(slots=True, eq=False)
class _DraftToken:
    """A draft token: its distribution after the draws of its elder siblings, and the state of its verification."""

    tokens: list[int]  # support of its distribution, the token itself first
    draft_probs: list[float]  # of these tokens
    target_probs: Tensor = field(default_factory=lambda: torch.empty(0))  # of these tokens; float64, on the host
    ratio: float = 0.0  # target_probs[0] / draft_probs[0]
    weight: float = 1.0  # p of the parent in arXiv 2403.10444: the share of the target that remains there
    remaining: float = 1.0  # p: the share that remains here
    probability: float = 1.0  # h: of being accepted, whatever follows

    def residual(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return the target's residual after this token's rejection, for the support of its distribution."""
        residual = self.target_probs - torch.tensor(self.draft_probs, dtype=torch.float64) / self.weight
        values: list[float] = residual.clamp_(min=0).tolist()
        return self.tokens, values


class _Outcome(NamedTuple):
    """The accepted tokens of a row, and the residual from which its own token is drawn."""

    path: list[int]
    rejected: bool
    residual: tuple[Sequence[int], Sequence[float]] = ((), ())  # tokens and weights; others keep the target's


class _Tree:
    def __init__(self, draft: Draft, *, block: bool) -> None:
        self._parents = draft.parents
        self._block = block
        self._children = draft.children()
        drawn_from = draft.distributions or [None] * len(draft.tokens)
        self.nodes = [_draft_token(token, origin) for token, origin in zip(draft.tokens, drawn_from, strict=True)]

    def rows(self, start: int) -> list[int]:
        """Return the rows of the target's probabilities that verify each token. start: the row after the text."""
        return [start + parent + 1 for parent in self._parents]

    def compute_weights(self) -> None:
        """Compute the share of the target that remains at every token, top down."""
        for index, node in enumerate(self.nodes):
            if self._continues_block(index):
                node.weight = self.nodes[self._parents[index]].remaining
            node.remaining = node.probability = min(1.0, node.weight * node.ratio)

    def apply_excess(self, excess: Sequence[float]) -> None:
        """Compute the acceptance probability of every token whose block goes on. excess: [K] from `_excess`."""
        for index, value in enumerate(excess):
            if self._continues_block(index):
                parent = self.nodes[self._parents[index]]
                total = value + 1 - parent.remaining
                parent.probability = value / total if total > 0 else 1.0

    def _continues_block(self, index: int) -> bool:
        """Whether a token is verified in one block with its parent."""
        parent = self._parents[index]
        return self._block and parent >= 0 and self._is_only_child(index) and self._is_only_child(parent)

    def _is_only_child(self, index: int) -> bool:
        return len(self._children[self._parents[index] + 1]) == 1

    def accept(self, uniforms: Sequence[float]) -> _Outcome:
        """Accept tokens from the text down. uniforms: [K or more], one for each token."""
        path: list[int] = []
        while siblings := self._children[path[-1] + 1 if path else 0]:
            accepted, rejected, residual = self._try(siblings, uniforms)
            path += accepted
            if rejected:
                return _Outcome(path, True, residual)
        return _Outcome(path, False)

    def _try(self, siblings: list[int], uniforms: Sequence[float]) -> _Outcome:
        """Verify the siblings at a branching one by one, or the block of tokens up to the next branching."""
        if len(siblings) > 1:
            return self._try_siblings(siblings, uniforms)
        block = list(siblings)
        while len(self._children[block[-1] + 1]) == 1 and self._continues_block(self._children[block[-1] + 1][0]):
            block += self._children[block[-1] + 1]
        count = max(
            (i for i, index in enumerate(block, start=1) if uniforms[index] < self.nodes[index].probability), default=0
        )
        if count == len(block):
            return _Outcome(block, False)
        return _Outcome(block[:count], True, self.nodes[block[count]].residual())

    def _try_siblings(self, siblings: list[int], uniforms: Sequence[float]) -> _Outcome:
        residual = _Residual()
        for index in siblings:
            node = self.nodes[index]
            draft_prob = node.draft_probs[0]
            if uniforms[index] * draft_prob < residual.probability(node.tokens[0], node.ratio * draft_prob):
                return _Outcome([index], False)
            residual.subtract(node)
        return _Outcome([], True, residual.weights())


class _Residual:
    """The target's distribution after rejected siblings: values of some tokens, a common factor for all others."""

    def __init__(self) -> None:
        self._scale = 1.0
        self._values: dict[int, float] = {}
        self._outside = 1.0  # the target's probability of all other tokens

    def probability(self, token: int, target_prob: float) -> float:
        return self._values.get(token, self._scale * target_prob)

    def subtract(self, node: _DraftToken) -> None:
        """Subtract a rejected token's distribution, and normalise."""
        target_probs = node.target_probs.tolist()
        for token, draft_prob, target_prob in zip(node.tokens, node.draft_probs, target_probs, strict=True):
            if token not in self._values:
                self._outside -= target_prob
            self._values[token] = max(0.0, self.probability(token, target_prob) - draft_prob)
        total = sum(self._values.values()) + self._scale * max(0.0, self._outside)
        if total > 0:
            self._scale /= total
            self._values = {token: value / total for token, value in self._values.items()}

    def weights(self) -> tuple[Sequence[int], Sequence[float]]:
        """Return tokens and their weights, on the scale of the target's probabilities of all other tokens."""
        return list(self._values), [value / self._scale for value in self._values.values()]


def _draft_token(token: int, drawn_from: Distribution | None) -> _DraftToken:
    if drawn_from is None:
        return _DraftToken([token], [1.0])
    rank = drawn_from.tokens.index(token)
    if rank == 0:
        return _DraftToken(*drawn_from)
    remaining = drawn_from.probabilities[rank:]
    total = sum(remaining)
    return _DraftToken(drawn_from.tokens[rank:], [probability / total for probability in remaining])


def _gather(probs: Tensor, trees: Sequence[_Tree], starts: Sequence[int]) -> None:
    """Fetch the target's probabilities for the support of every draft token's distribution."""
    nodes = [node for tree in trees for node in tree.nodes]
    rows = [row for tree, start in zip(trees, starts, strict=False) for row in tree.rows(start)]
    counts = [len(node.tokens) for node in nodes]
    index = torch.tensor(rows, dtype=torch.int64).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    tokens = torch.tensor([token for node in nodes for token in node.tokens], dtype=torch.int64)
    gathered = probs[copy_to(probs.device, index), copy_to(probs.device, tokens)].cpu().double()
    gathered.nan_to_num_(0.0)  # below a token that the grammar forbids, nothing may be allowed
    for node, target_probs in zip(nodes, gathered.split(counts), strict=True):
        node.target_probs = target_probs
    firsts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64)[:-1]
    for node, target_prob in zip(nodes, gathered[firsts].tolist(), strict=True):
        node.ratio = target_prob / node.draft_probs[0]


def _excess(trees: Sequence[_Tree]) -> list[list[float]]:
    """Return the probability mass by which the remaining target exceeds the draft, [B][K]: S in arXiv 2403.10444."""
    nodes = [node for tree in trees for node in tree.nodes]
    if not nodes:
        return [[] for _ in trees]
    counts = torch.tensor([len(node.tokens) for node in nodes])
    owners = torch.arange(len(nodes)).repeat_interleave(counts)  # [F]
    weights = torch.tensor([node.weight for node in nodes], dtype=torch.float64)
    target = torch.cat([node.target_probs for node in nodes]) * weights[owners]  # [F]
    draft = torch.tensor([prob for node in nodes for prob in node.draft_probs], dtype=torch.float64)
    outside = weights.index_add(0, owners, -target).clamp_(min=0)
    excess = iter(outside.index_add_(0, owners, (target - draft).clamp_(min=0)).tolist())
    return [list(islice(excess, len(tree.nodes))) for tree in trees]


def _sample_own(
    probs: Tensor, rows: Sequence[RejectionRow], outcomes: Sequence[_Outcome], starts: Sequence[int]
) -> list[int]:
    """Sample each row's own token from its residual, [B], or NO_TOKEN. probs: [N, V]."""
    ends = [outcome.path[-1] + 1 if outcome.path else 0 for outcome in outcomes]
    chosen = torch.tensor([start + end for start, end in zip(starts, ends, strict=False)], dtype=torch.int64)
    target = probs[copy_to(probs.device, chosen)].float()  # [B, V]
    index = [(row, token) for row, outcome in enumerate(outcomes) for token in outcome.residual[0]]
    values = tensor_on(probs.device, [value for outcome in outcomes for value in outcome.residual[1]], torch.float32)
    residual_rows, residual_tokens = tensor_on(probs.device, index, torch.int64).reshape(-1, 2).unbind(-1)
    residual = target.index_put((residual_rows, residual_tokens), values)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)  # empty only by rounding
    keys = _keys([(row.seed, row.position + len(o.path), OWN_TOKENS) for row, o in zip(rows, outcomes, strict=True)])
    scores, tokens = residual.log_().add_(gumbel(copy_to(probs.device, keys), probs.shape[-1])).max(dim=-1)
    own: list[int] = tokens.masked_fill(~scores.isfinite(), NO_TOKEN).tolist()
    return own


def _keys(noises: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return [N, 2] int32 from seeds, positions and streams."""
    return torch.tensor([noise_key(*noise) for noise in noises], dtype=torch.int32).reshape(-1, 2)
