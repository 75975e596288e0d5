"""Commits what a target chose: rows grow, and their drafters and coordinators are sent the new tokens.

Knows nothing of logits, or of when steps are taken.
"""

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from actors.loops.mailbox import Mailbox
from actors.model.runner import Runner
from actors.target.beams import BeamRow
from actors.target.inbox import TargetInbox
from actors.target.judge import Verdict
from actors.target.planner import DraftPlanner
from actors.target.row import TargetRow
from actors.target.rows import ServedRow, TargetRows
from actors.wire.messages import Commit
from decoding.drafts.trie import Draft
from decoding.sampling.stopping import cut_at_stop


class Committer:
    """The committer of one target. It skips rows that were removed or replaced since their step began."""

    def __init__(
        self, rows: TargetRows, runner: Runner, planner: DraftPlanner, inbox: TargetInbox, mailbox: Mailbox[ServedRow]
    ) -> None:
        self._rows, self._runner, self._planner, self._inbox, self._mailbox = rows, runner, planner, inbox, mailbox

    def commit_step(self, rows: Sequence[TargetRow], drafts: Sequence[Draft], verdicts: Sequence[Verdict]) -> int:
        """Commit each row's accepted draft tokens and the target's own token. Returns the number of all."""
        committed = 0
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            if self._check(row, verdict):
                path = verdict.path
                self._planner.note_verdict(row, drafted=len(path) + verdict.rejected, accepted=len(path))
                self._runner.compact(row.slot, row.cached + 1, [row.cached + 1 + index for index in path])
                self._commit(row, draft, verdict)
                committed += len(path) + 1
        return committed

    def commit_first(self, rows: Sequence[TargetRow], verdicts: Sequence[Verdict]) -> None:
        """Commit the first token of rows whose prompt is in the cache."""
        for row, verdict in zip(rows, verdicts, strict=True):
            row.cached -= 1  # as in a step, where the cache lacks the last token: `_commit` counts it
            if self._check(row, verdict):
                self._commit(row, Draft([], []), verdict)

    def fork_beams(self, row: BeamRow, logits: Tensor) -> None:
        """Advance a beam search, and send its answers if that ended it. logits: as in `BeamRow.take`."""
        if not row.take(logits):
            return
        result = row.result()
        if row.error is not None and not result.answers:
            self._inbox.fail(row, row.error)
        else:
            self._mailbox.put(row.key[0], result)
            self._rows.remove(row.key)

    def _check(self, row: TargetRow, verdict: Verdict) -> bool:
        """Return whether the row can commit. Fails a row whose structure allows nothing after its text."""
        if self._rows.get(row.key) is not row:
            return False
        error = row.structure and row.structure.error_after(verdict.path[-1] if verdict.path else -1)
        if error:
            self._inbox.fail(row, error)
        return not error

    def _commit(self, row: TargetRow, draft: Draft, verdict: Verdict) -> None:
        peer, request_id = row.key
        tokens = verdict.tokens(draft)
        kept, finish = cut_at_stop(
            tokens, row.generated, end_token_ids=row.history.end_token_ids, max_tokens=row.params.max_tokens
        )
        commit = Commit(
            request_id=request_id,
            base=len(row.tokens),
            tokens=kept,
            drafted=len(draft.tokens),
            accepted=min(len(verdict.path), len(kept)),
            finish=finish,
            logprobs=verdict.logprobs and verdict.logprobs[: len(kept)],
            prompt_logprobs=row.prompt_logprobs if row.generated == 0 and row.wants_prompt_logprobs else None,
            members=row.ensemble.shares() if row.ensemble else None,
            admission=row.admission,
            views=row.ensemble.views and row.ensemble.views[: len(kept)] if row.ensemble else None,
        )
        row.cached += len(tokens)
        row.commit(kept, rejected=verdict.rejected)
        if finish is None:
            if verdict.rejected:
                commit = replace(commit, rejected=True, hit=bool(row.trie))
            self._inbox.update_drafter(row)  # before the coordinator: the target waits for its drafts
        self._mailbox.put(peer, commit)
        if finish is not None:
            self._rows.remove(row.key)
        elif self._rows.drafting:
            row.propose()
