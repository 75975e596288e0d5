"""From a step's logits to what each row commits: the sampler, the rules of verification, log-probabilities.

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
from decoding.sampling.history import Position
from decoding.sampling.logprobs import TokenLogprobs, token_logprobs
from decoding.sampling.sampler import SamplingBatch, probabilities, sample
from decoding.sampling.transfer import tensor_on


class Verdict(NamedTuple):
    """What a row commits: accepted draft tokens, and one of the target's own."""

    path: list[int]  # places of the accepted tokens in the draft, top down
    own: int
    rejected: bool  # whether the own token is not what was drafted in its place
    logprobs: list[TokenLogprobs] | None = None  # of all these tokens, if asked for

    def places(self) -> list[int]:
        """After which of the K + 1 positions each committed token stands: 0 is the text's end."""
        return [0, *(place + 1 for place in self.path)]

    def tokens(self, draft: Draft) -> list[int]:
        """What is committed."""
        return [*(draft.tokens[place] for place in self.path), self.own]


def judge(
    rows: Sequence[TargetRow], drafts: Sequence[Draft], logits: Tensor, masks: Sequence[Tensor | None]
) -> list[Verdict]:
    """The verdicts on the rows' drafts.

    Args:
        logits: [N, V], after each row's text and after each of its K draft tokens, row after row.
        masks: for each row, [K + 1, ⌈V / 32⌉] int32 what its structure allows there, or None.
    """
    verdicts: dict[int, Verdict] = {}
    starts = [0, *accumulate(len(draft.tokens) + 1 for draft in drafts)]
    for rule in (_coupled, _by_rejection):
        chosen = [at for at, row in enumerate(rows) if row.params.rejects == (rule is _by_rejection)]
        if not chosen:
            continue
        part = logits
        if len(chosen) < len(rows):
            flat = [place for at in chosen for place in range(starts[at], starts[at + 1])]
            part = logits[tensor_on(logits.device, flat, torch.int64)]
        found = rule([rows[at] for at in chosen], [drafts[at] for at in chosen], part, [masks[at] for at in chosen])
        verdicts.update(zip(chosen, found, strict=True))
    ordered = [verdicts[at] for at in range(len(rows))]
    return _with_logprobs(rows, drafts, ordered, logits, starts)


def _coupled(
    rows: Sequence[TargetRow], drafts: Sequence[Draft], logits: Tensor, masks: Sequence[Tensor | None]
) -> list[Verdict]:
    """Siblings in a tree stand at the same position, so they see the same noise."""
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
    """After each row's text, and after each of its draft tokens."""
    return [
        Position(row.history, path, None if mask is None else mask[at])
        for row, draft, mask in zip(rows, drafts, masks, strict=True)
        for at, path in enumerate([[], *draft.paths()])
    ]


def _with_logprobs(
    rows: Sequence[TargetRow],
    drafts: Sequence[Draft],
    verdicts: list[Verdict],
    logits: Tensor,
    starts: Sequence[int],
) -> list[Verdict]:
    """The log-probabilities of what is committed, for the rows that want them. starts: [B + 1] as in `logits`."""
    places: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for row, draft, verdict, start in zip(rows, drafts, verdicts, starts[:-1], strict=True):
        if row.params.logprobs is not None:
            places += [start + place for place in verdict.places()]
            tokens += verdict.tokens(draft)
            counts += [row.params.logprobs] * (len(verdict.path) + 1)
    if not places:
        return verdicts
    found = iter(token_logprobs(logits[tensor_on(logits.device, places, torch.int64)], tokens, counts))
    return [
        verdict
        if row.params.logprobs is None
        else verdict._replace(logprobs=[next(found) for _ in range(len(verdict.path) + 1)])
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
