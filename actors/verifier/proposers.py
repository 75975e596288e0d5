"""The interface of proposers, and the two that delay no step: drafters in other processes, and n-gram look-up.

Two more draft on the target's device before a step: a colocated drafter (`colocated_drafter.py`) and heads
(`heads_drafter.py`).
"""

from collections.abc import Sequence

from actors.loops.mailbox import Mailbox
from actors.loops.row import Row, RowKey, ServedRow
from actors.verifier.rows import TargetRow, TargetRows, Verification
from actors.wire.messages import Admit
from decoding.drafts.draft import ProposerName
from decoding.drafts.ngram import NgramProposer, NgramProposers
from decoding.drafts.verification import Verdict

_READ_AHEAD = 16_384  # tokens that look-up reads in a turn, all rows together: long texts must not hold up other rows


class Proposer:
    """Makes drafts for the rows of one target. It does not know when it is asked, or what else drafts."""

    name: ProposerName
    token_s: float | None = None  # by which a draft token of all rows delayed the last step; None: it delays no step
    rests_alone = False  # whether it may rest when nothing else delays the step; if not, its draft lengths fall to 0

    def drafts_for(self, row: TargetRow) -> bool:
        """Whether it drafts for this row at all."""
        raise NotImplementedError

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Make drafts of what follows the rows' texts. Returns the rows whose tries have them already.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        raise NotImplementedError

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from a step that was committed, whether this proposer was asked or not."""

    def remove(self, row: Row) -> None:
        """Forget a row."""


class AttachedDrafters(Proposer):
    """Drafters in other processes. Their drafts come as `Offer`s."""

    name: ProposerName = "drafter"

    def __init__(self, rows: TargetRows, mailbox: Mailbox[ServedRow]) -> None:
        self._rows, self._mailbox = rows, mailbox

    def drafts_for(self, row: TargetRow) -> bool:
        return row.attached_drafter is not None

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Send the rows' new text to their drafters. While drafts are not wanted, it tells them to rest."""
        for row in rows:
            if row.attached_drafter is None:
                continue
            # The useful draft length is that of the step before, which is recent enough for the drafter.
            advance = row.drafts.next_advance(row.drafts.useful_length if self._rows.drafting else 0)
            if advance is not None:
                self._mailbox.put(row.attached_drafter, advance)
        return set()

    def rest(self, row: TargetRow) -> None:
        """While drafts are not wanted, let the row's drafter rest, whatever it was told before."""
        if row.attached_drafter is not None and not self._rows.drafting:
            self._mailbox.put(row.attached_drafter, row.drafts.rest())


class NgramLookup(Proposer):
    """N-gram look-up in the rows' own texts and in earlier answers."""

    name: ProposerName = "ngram"

    def __init__(self, rows: TargetRows) -> None:
        self._rows, self._lookups = rows, NgramProposers()

    def make(self, admit: Admit) -> NgramProposer | None:
        """Return the look-up of a request, if it wants one."""
        if admit.ngram is None or not admit.draft_length:
            return None
        private = admit.params.rejects or bool(admit.cache_salt)
        return self._lookups.make(admit.ngram, admit.draft_length, private=private)

    def drafts_for(self, row: TargetRow) -> bool:
        return row.drafts.lookup is not None

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        if not self._rows.drafting:
            return set()
        for row in rows:
            row.drafts.look_up()
        return {row.key for row in rows if self.drafts_for(row)}

    def read(self) -> None:
        """Index texts, the shortest first, whether the rows compute them or found them in the cache."""
        rows = [row for row in self._rows.writers if row.slot >= 0]
        texts = [(row.drafts.lookup, row.tokens) for row in rows if row.drafts.lookup is not None]
        left = _READ_AHEAD
        for lookup, tokens in sorted(texts, key=lambda text: len(text[1])):
            left -= lookup.read(tokens, left)
