"""Commits what a target chose: rows grow, and their drafters and coordinators are sent the new tokens."""

from collections.abc import Iterable, Sequence
from itertools import chain, repeat

import torch

from actors.loops.mailbox import Mailbox
from actors.loops.row import ServedRow
from actors.verifier.inbox import TargetInbox
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.rows import TargetRow, TargetRows, Verification
from actors.wire.messages import Commit, PromptAttention, Token, TokenSource
from decoding.drafts.draft import Draft
from decoding.drafts.verification import Verdict
from decoding.errors import OutOfPagesError, UnavailableError
from decoding.sampling.stopping import cut_at_stop
from engine.model.runner import Runner


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
                    self._policy.note_verdict(row, drafted=len(path) + verdict.rejected, accepted=len(path))
                if path and path[-1] >= len(path):  # not the draft's first tokens
                    self._runner.compact(row.slot, row.cached + 1, [row.cached + 1 + index for index in path])
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
        tokens, generated = verdict.tokens(draft), base - row.prompt_length
        kept, finish = cut_at_stop(
            tokens, generated, end_token_ids=row.history.end_token_ids, max_tokens=row.params.max_tokens
        )
        is_first = generated == 0
        row.cached += len(tokens)
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


def _records(row: TargetRow, draft: Draft, verdict: Verdict, kept: Sequence[int]) -> list[Token]:
    """Return the record of each kept token."""
    own: TokenSource = "recovered" if verdict.rejected else "bonus" if draft.tokens else "plain"
    views = row.ensemble.views if row.ensemble is not None else None
    if not verdict.path and verdict.logprobs is None and views is None:  # as in most steps without a draft
        return [Token(kept[0], own)]
    sources: Iterable[TokenSource] = chain(repeat("accepted", len(verdict.path)), (own,))
    proposers = chain([names[0] for names in verdict.accepted(draft.proposers)], repeat(None))
    columns = kept, sources, proposers, verdict.logprobs or repeat(None), views or repeat(())
    return [Token(*fields) for fields in zip(*columns, strict=False)]  # the shortest are the kept tokens
