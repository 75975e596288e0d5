"""From a step's logits to the tokens that each row commits, by sampling and verification."""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from actors.verifier.rows import TargetRow, Verification
from decoding.drafts.verification import RejectionRow, Verdict, accepted_path, verify_by_rejection
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import Positions
from decoding.sampling.penalties import TextTables
from decoding.sampling.sampler import (
    NO_TOKEN,
    probabilities,
    reason_for_no_token,
    sample,
    token_logprobs,
)
from decoding.sampling.transfer import tensor_on


def judge(verifications: Sequence[Verification], logits: Tensor, tables: TextTables) -> Callable[[], list[Verdict]]:
    """Launch the verification of drafts. The function that is returned waits for the device, and returns the verdicts.

    logits: [N, V] of a step. tables: of the rows' texts.
    """
    coupled = [verification for verification in verifications if not verification.row.rejects]
    rejecting = [verification for verification in verifications if verification.row.rejects]
    parts = (_coupled, coupled), (_by_rejection, rejecting)
    waits = [rule(part, _rows_of(part, logits), tables) if part else list for rule, part in parts]

    def wait() -> list[Verdict]:
        by_rule = [iter(wait()) for wait in waits]
        verdicts = [next(by_rule[v.row.rejects]) for v in verifications]
        if any(verdict.own == NO_TOKEN for verdict in verdicts):
            verdicts = [_explained(*pair, logits) for pair in zip(verifications, verdicts, strict=True)]
        if any(v.row.params.logprobs is not None for v in verifications):
            return _with_logprobs(verifications, verdicts, logits)
        return verdicts

    return wait


def _explained(verification: Verification, verdict: Verdict, logits: Tensor) -> Verdict:
    """Return the verdict, with the reason if there is no own token. logits: [N, V] of a step."""
    if verdict.own != NO_TOKEN:
        return verdict
    return Verdict(
        [], NO_TOKEN, rejected=False, error=reason_for_no_token(logits[verification.rows[verdict.logits_rows()[-1]]])
    )


def _rows_of(verifications: Sequence[Verification], logits: Tensor) -> Tensor:
    """Return the logits that decide on these drafts, row after row. logits: [N, V] of a step."""
    if sum([len(v.rows) for v in verifications]) == len(logits):
        return logits
    return logits[tensor_on(logits.device, [*chain.from_iterable([v.rows for v in verifications])], torch.int64)]


def _coupled(verifications: Sequence[Verification], logits: Tensor, tables: TextTables) -> Callable[[], list[Verdict]]:
    """Verify by sampling with shared noise. Siblings in a tree have the same position, so the same noise."""
    batch = SamplingBatch.of([*map(_positions, verifications)], logits.shape[-1], logits.device, tables)
    sampled = sample(logits, batch)  # [N]

    def wait() -> list[Verdict]:
        tokens: list[int] = sampled.tolist()  # the step's only copy to the host
        verdicts, start = [], 0
        for _, draft, *_ in verifications:
            end = start + len(draft.tokens) + 1
            path, rejected = accepted_path(tokens[start:end], draft) if draft.tokens else ([], False)
            verdicts.append(Verdict(path, tokens[start + path[-1] + 1 if path else start], rejected))
            start = end
        return verdicts

    return wait


def _by_rejection(
    verifications: Sequence[Verification], logits: Tensor, tables: TextTables
) -> Callable[[], list[Verdict]]:
    batch = SamplingBatch.of([*map(_positions, verifications)], logits.shape[-1], logits.device, tables)
    distribution = probabilities(logits, batch)  # [N, V]
    judged = [RejectionRow(draft, row.params.seed, len(row.tokens)) for row, draft, *_ in verifications]
    return lambda: verify_by_rejection(distribution, judged)


def _positions(verification: Verification) -> Positions:
    """Return the positions after a row's text and after each of its draft tokens."""
    row, draft, _, mask = verification
    if not draft.tokens and mask is None:
        return row.end
    depths = range(len(draft.tokens) + 1) if draft.is_chain else (0, *draft.depths())
    return Positions(row.history, depths, lambda: [(), *draft.paths()], mask)


def _with_logprobs(verifications: Sequence[Verification], verdicts: list[Verdict], logits: Tensor) -> list[Verdict]:
    """Add log-probabilities to the verdicts on rows that want them. logits: [N, V] of a step."""
    logits_rows: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    for (row, draft, rows, _), verdict in zip(verifications, verdicts, strict=True):
        if _wants_logprobs(row, verdict):
            logits_rows += [rows[index] for index in verdict.logits_rows()]
            tokens += verdict.tokens(draft)
            counts += [row.params.logprobs or 0] * (len(verdict.path) + 1)
    chosen_logits = logits[tensor_on(logits.device, logits_rows, torch.int64)]
    logprobs = iter(token_logprobs(chosen_logits, tokens, counts))
    return [
        verdict
        if not _wants_logprobs(row, verdict)
        else verdict._replace(logprobs=[next(logprobs) for _ in range(len(verdict.path) + 1)])
        for (row, *_), verdict in zip(verifications, verdicts, strict=True)
    ]


def _wants_logprobs(row: TargetRow, verdict: Verdict) -> bool:
    return row.params.logprobs is not None and verdict.error is None
