"""From a step's logits to the tokens that each row commits, by sampling and verification.

Knows nothing of messages, caches or where the logits come from.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from actors.target.row import TargetRow
from decoding.drafts.rejection import RejectionRow, verify_by_rejection
from decoding.drafts.trie import Draft
from decoding.drafts.verify import accepted_path
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import Position
from decoding.sampling.logprobs import TokenLogprobs, token_logprobs
from decoding.sampling.sampler import probabilities, sample
from decoding.sampling.transfer import tensor_on


class Verdict(NamedTuple):
    """What a row commits: accepted draft tokens, and one of the target's own."""

    path: list[int]  # indices of the accepted tokens in the draft, top down
    own: int
    rejected: bool  # whether the own token replaces a rejected draft token
    logprobs: list[TokenLogprobs] | None = None  # of all these tokens, if wanted

    def logits_rows(self) -> list[int]:
        """Return the row of the step's K + 1 logits that each committed token was chosen from."""
        return [0, *(index + 1 for index in self.path)]

    def tokens(self, draft: Draft) -> list[int]:
        """Return the committed tokens."""
        return [*(draft.tokens[index] for index in self.path), self.own]


def judge(
    rows: Sequence[TargetRow], drafts: Sequence[Draft], logits: Tensor, masks: Sequence[Tensor | None]
) -> list[Verdict]:
    """Return the verdicts on the rows' drafts.

    Args:
        logits: [N, V], after each row's text and after each of its K draft tokens, row after row.
        masks: per row [K + 1, ⌈V / 32⌉] int32, the tokens that its structure allows; None for all.
    """
    verdicts: dict[int, Verdict] = {}
    starts = [0, *accumulate(len(draft.tokens) + 1 for draft in drafts)]
    for rule in (_coupled, _by_rejection):
        chosen = [index for index, row in enumerate(rows) if row.params.rejects == (rule is _by_rejection)]
        if not chosen:
            continue
        chosen_logits = logits
        if len(chosen) < len(rows):
            logits_rows = [logits_row for index in chosen for logits_row in range(starts[index], starts[index + 1])]
            chosen_logits = logits[tensor_on(logits.device, logits_rows, torch.int64)]
        chosen_rows, chosen_drafts = [rows[index] for index in chosen], [drafts[index] for index in chosen]
        chosen_verdicts = rule(chosen_rows, chosen_drafts, chosen_logits, [masks[index] for index in chosen])
        verdicts.update(zip(chosen, chosen_verdicts, strict=True))
    ordered = [verdicts[index] for index in range(len(rows))]
    return _with_logprobs(rows, drafts, ordered, logits, starts)


def _coupled(
    rows: Sequence[TargetRow], drafts: Sequence[Draft], logits: Tensor, masks: Sequence[Tensor | None]
) -> list[Verdict]:
    """Verify by sampling with shared noise. Siblings in a tree have the same position, so the same noise."""
    batch = SamplingBatch.build(_positions(rows, drafts, masks), logits.shape[-1], logits.device)
    sampled = sample(logits, batch).tolist()
    verdicts = []
    start = 0
    for draft in drafts:
        own = sampled[start : start + len(draft.tokens) + 1]
        path, rejected = accepted_path(own, draft)
        verdicts.append(Verdict(path, own[path[-1] + 1 if path else 0], rejected))
        start += len(own)
    return verdicts


def _by_rejection(
    rows: Sequence[TargetRow], drafts: Sequence[Draft], logits: Tensor, masks: Sequence[Tensor | None]
) -> list[Verdict]:
    batch = SamplingBatch.build(_positions(rows, drafts, masks), logits.shape[-1], logits.device)
    judged = [RejectionRow(draft, row.params.seed, len(row.tokens)) for row, draft in zip(rows, drafts, strict=True)]
    return [Verdict(*verdict) for verdict in verify_by_rejection(probabilities(logits, batch), judged)]


def _positions(rows: Sequence[TargetRow], drafts: Sequence[Draft], masks: Sequence[Tensor | None]) -> list[Position]:
    """Return the positions after each row's text and after each of its draft tokens."""
    return [
        Position(row.history, path, None if mask is None else mask[index])
        for row, draft, mask in zip(rows, drafts, masks, strict=True)
        for index, path in enumerate([[], *draft.paths()])
    ]


def _with_logprobs(
    rows: Sequence[TargetRow],
    drafts: Sequence[Draft],
    verdicts: list[Verdict],
    logits: Tensor,
    starts: Sequence[int],
) -> list[Verdict]:
    """Add log-probabilities to the verdicts on rows that want them. starts: [B + 1] each row's first of `logits`."""
    logits_rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for row, draft, verdict, start in zip(rows, drafts, verdicts, starts[:-1], strict=True):
        if row.params.logprobs is not None:
            logits_rows += [start + logits_row for logits_row in verdict.logits_rows()]
            tokens += verdict.tokens(draft)
            counts += [row.params.logprobs] * (len(verdict.path) + 1)
    if not logits_rows:
        return verdicts
    chosen_logits = logits[tensor_on(logits.device, logits_rows, torch.int64)]
    logprobs = iter(token_logprobs(chosen_logits, tokens, counts))
    return [
        verdict
        if row.params.logprobs is None
        else verdict._replace(logprobs=[next(logprobs) for _ in range(len(verdict.path) + 1)])
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
