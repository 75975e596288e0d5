"""From a step's logits to the tokens that each row commits: verdicts by sampling and verification, and what follows."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat

import torch
from torch import Tensor

from actors.loops.mailbox import Mailbox
from actors.loops.row import ServedRow
from actors.verifier.inbox import TargetInbox
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.rows import TargetRow, TargetRows, Verification
from actors.wire.messages import Commit, PromptAttention, Token, TokenSource
from decoding.drafts.draft import LOOKUPS, Draft, ProposerName
from decoding.drafts.verification import RejectionRow, Verdict, accepted_path, verify_by_rejection
from decoding.errors import OutOfPagesError, UnavailableError
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.history import Positions
from decoding.sampling.penalties import TextTables
from decoding.sampling.sampler import NO_TOKEN, probabilities, reason_for_no_token, sample, token_logprobs
from decoding.sampling.transfer import tensor_on
from engine.model.runner import Runner


def judge(verifications: Sequence[Verification], logits: Tensor, tables: TextTables) -> Callable[[], list[Verdict]]:
    """Launch the verification of drafts. The function that is returned waits for the device, and returns the verdicts.

    logits: [N, V] of a step. tables: of the rows' texts.
    """
    coupled = [verification for verification in verifications if not verification.row.rejects]
    rejecting = [verification for verification in verifications if verification.row.rejects]
    parts = (_coupled, coupled), (_by_rejection, rejecting)
    waits = [rule(part, *_batch(part, logits, tables)) if part else list for rule, part in parts]

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
    last = verification.rows[verdict.logits_rows()[-1]]
    return Verdict([], NO_TOKEN, rejected=False, error=reason_for_no_token(logits[last]))


def _batch(verifications: Sequence[Verification], logits: Tensor, tables: TextTables) -> tuple[Tensor, SamplingBatch]:
    """Return the logits that decide on these drafts, row after row, and their batch. logits: [N, V] of a step."""
    if sum([len(v.rows) for v in verifications]) != len(logits):
        rows = [*chain.from_iterable([v.rows for v in verifications])]
        logits = logits[tensor_on(logits.device, rows, torch.int64)]
    return logits, SamplingBatch.of([*map(_positions, verifications)], logits.shape[-1], logits.device, tables)


def _coupled(
    verifications: Sequence[Verification], logits: Tensor, batch: SamplingBatch
) -> Callable[[], list[Verdict]]:
    """Verify by sampling with shared noise. Siblings in a tree have the same position, so the same noise."""
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
    verifications: Sequence[Verification], logits: Tensor, batch: SamplingBatch
) -> Callable[[], list[Verdict]]:
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
    pairs = [*zip(verifications, verdicts, strict=True)]
    wanted = [(v, verdict) for v, verdict in pairs if _wants_logprobs(v.row, verdict)]
    logits_rows = [v.rows[index] for v, verdict in wanted for index in verdict.logits_rows()]
    tokens = [token for v, verdict in wanted for token in verdict.tokens(v.draft)]
    counts = [v.row.params.logprobs or 0 for v, verdict in wanted for _ in verdict.logits_rows()]
    chosen_logits = logits[tensor_on(logits.device, logits_rows, torch.int64)]
    logprobs = iter(token_logprobs(chosen_logits, tokens, counts))
    return [
        verdict
        if not _wants_logprobs(row, verdict)
        else verdict._replace(logprobs=[next(logprobs) for _ in range(len(verdict.path) + 1)])
        for (row, *_), verdict in pairs
    ]


def _wants_logprobs(row: TargetRow, verdict: Verdict) -> bool:
    return row.params.logprobs is not None and verdict.error is None


class Committer:
    """The committer of one target. It skips rows that were removed or replaced since their step began."""

    def __init__(
        self,
        rows: TargetRows,
        runner: Runner,
        policy: SpeculationPolicy,
        inbox: TargetInbox,
        mailbox: Mailbox[ServedRow],
    ) -> None:
        self._rows, self._runner, self._policy, self._inbox, self._mailbox = rows, runner, policy, inbox, mailbox

    def commit(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> int:
        """Commit each row's accepted draft tokens and the target's own token. Returns how many were committed."""
        committed = 0
        commits: list[tuple[TargetRow, Commit]] = []
        for (row, draft, *_), verdict in zip(verifications, verdicts, strict=True):
            if self._check(row, verdict):
                path = verdict.path
                if row.draft_length:
                    tested, accepted = _of_models(draft, verdict)
                    self._policy.note_verdict(row, drafted=tested, accepted=accepted)
                if path and path[-1] >= len(path):  # not the draft's first tokens
                    for text in row.texts:
                        self._runner.compact(text.slot, text.cached + 1, [text.cached + 1 + index for index in path])
                commit = self._commit(row, draft, verdict)
                if commit is not None:
                    commits.append((row, commit))
                committed += len(path) + 1
        self._policy.follow([row for row, commit in commits if commit.finish is None])  # first: the target waits for it
        for row, commit in commits:
            self._mailbox.put(row.key[0], commit)
            if commit.finish is not None:
                self._rows.remove(row.key)
        return committed

    def _check(self, row: TargetRow, verdict: Verdict) -> bool:
        """Return whether the row can commit. Fails a row after whose text nothing can be chosen."""
        if self._rows.get(row.key) is not row:
            return False
        error = row.structure and row.structure.error_after(verdict.path[-1] if verdict.path else -1)
        if error:
            self._inbox.fail(row, error)
        elif verdict.error is not None:
            self._inbox.fail(
                row, UnavailableError(f"nothing can be chosen after {len(row.tokens)} tokens: {verdict.error}")
            )
        return not error and verdict.error is None

    def _commit(self, row: TargetRow, draft: Draft, verdict: Verdict) -> Commit | None:
        """Commit to the row's text. Returns what its coordinator is to be told; None if the row has failed."""
        base = len(row.tokens)
        tokens = verdict.tokens(draft)
        kept, finish = row.cut(tokens)
        is_first = base == row.prompt_length
        for text in row.texts:
            text.cached += len(tokens)
        row.commit(kept, rejected=verdict.rejected)
        commit = Commit(  # by position, because a step has one per row, and msgspec takes four times as long by name
            row.key[1],
            base,
            _records(row, draft, verdict, kept),
            finish,
            len(draft.tokens),
            draft.proposed_by() if draft.proposers else {},
            verdict.rejected and bool(row.drafts.trie),
            row.admission,
            row.preemptions,
            row.prompt_logprobs if is_first and row.wants_prompt_logprobs else None,
            row.ensemble.shares() if row.ensemble else None,
            min(row.reused or 0, row.prompt_length) if is_first else 0,
        )
        row.preemptions = 0
        if finish is not None and row.params.prompt_attention:
            try:
                self._mailbox.put(row.key[0], PromptAttention(row.key[1], self._attention(row), row.admission))
            except (OutOfPagesError, torch.OutOfMemoryError) as error:
                self._inbox.fail(row, error)
                return None
        return commit

    def _attention(self, row: TargetRow) -> list[float]:
        """Return how much the answer attends to each token of the prompt: the mean over the answer's tokens."""
        attention = self._runner.attention(row.attention_input())[:, : row.prompt_length]  # [Q, prompt]
        weights: list[float] = attention.mean(dim=0).tolist()
        return weights


def _of_models(draft: Draft, verdict: Verdict) -> tuple[int, int]:
    """Return how many tokens of models were tested and accepted. Copies of texts know their own probabilities."""
    path = verdict.path
    if not draft.proposers:
        return len(path) + verdict.rejected, len(path)
    from_model = [not LOOKUPS.issuperset(names) for names in draft.proposers]
    accepted = next((depth for depth, index in enumerate(path) if not from_model[index]), len(path))
    parent = path[accepted - 1] if accepted else -1
    tests_another = any(node == parent and of for node, of in zip(draft.parents, from_model, strict=True))
    return accepted + tests_another, accepted


def _records(row: TargetRow, draft: Draft, verdict: Verdict, kept: Sequence[int]) -> list[Token]:
    own: TokenSource = "recovered" if verdict.rejected else "bonus" if draft.tokens else "plain"
    views = row.ensemble.views if row.ensemble is not None else None
    if verdict.logprobs is None and views is None:
        if not verdict.path:
            return [Token(kept[0], own)]
        names = [each[0] for each in verdict.accepted(draft.proposers)]
        known: Iterable[ProposerName | None] = names or repeat(None, len(verdict.path))
        records = [Token(token, "accepted", name) for token, name in zip(kept, known, strict=False)]
        return records if len(records) == len(kept) else [*records, Token(kept[-1], own)]
    sources: Iterable[TokenSource] = chain(repeat("accepted", len(verdict.path)), (own,))
    proposers = chain([names[0] for names in verdict.accepted(draft.proposers)], repeat(None))
    columns = kept, sources, proposers, verdict.logprobs or repeat(None), views or repeat(())
    return [Token(*fields) for fields in zip(*columns, strict=False)]  # the shortest are the kept tokens
