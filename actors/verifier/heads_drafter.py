"""Heads of a target as a proposer: they read its hidden states, and draft for all rows before each step.

What a step ran is read right before the next draft. So while nothing is drafted they take no time. What they missed
stays a gap in their keys, which can only cost acceptance.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from actors.loops.row import Row, RowKey
from actors.verifier.proposers import Delay, Proposer
from actors.verifier.rows import TargetRow, TargetRows, Verification
from decoding.drafts.choices import RANKS, Candidates, DraftChoice, RankCalibration, best_tree, tree_of
from decoding.drafts.verification import Verdict
from engine.heads.proposer import DraftStart, HeadProposer, Reading
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner


class _Ran(NamedTuple):
    """A row's part of the forward that is to be read."""

    row: TargetRow
    start: int  # the position of its first token
    first: int  # that token's row of `HiddenStates.layers`
    wanted_end: int  # after its last row of `HiddenStates.last`


class _Unread(NamedTuple):
    """What a step ran of a row, which its next draft needs."""

    state: tuple[RowKey, int]  # the row's after the step
    reading: Reading


class _Guess(NamedTuple):
    """A row's candidates, to be compared with what the target chooses."""

    base: int  # the position of the first
    choices: Sequence[DraftChoice]


class HeadsDrafter(Proposer):
    """The heads of one target replica."""

    rests_alone = True

    def __init__(self, heads: HeadProposer, runner: Runner, rows: TargetRows) -> None:
        self._heads, self._runner, self._rows = heads, runner, rows
        self.name = heads.kind
        self.delay: Delay = Delay(0.0, 0.0)
        ranks = RANKS if heads.tree is None else 1 + max((rank for path in heads.tree for rank in path), default=0)
        self._ranks = min(max(ranks, RANKS), runner.vocab_size)
        self._calibrations: defaultdict[tuple[bool, int], RankCalibration] = defaultdict(
            lambda: RankCalibration(self._ranks)
        )  # by whether the row is greedy, and depth
        self._read: dict[int, tuple[RowKey, int]] = {}  # by slot: whose text its state is of, and up to which length
        self._guesses: dict[RowKey, _Guess] = {}
        self._ran: list[_Ran] = []
        self._unread: dict[int, _Unread] = {}  # by slot, of the last forward
        self._hidden: HiddenStates | None = None  # of that forward: a runner has those of other calls, too

    def drafts_for(self, row: TargetRow) -> bool:
        return row.drafts.heads

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Put drafts of what follows their texts into the rows' tries. Returns the rows that got any.

        Raises OutOfPagesError as in `Runner.logits`.
        """
        began_s = time.perf_counter()
        self.delay = Delay(0.0, 0.0)
        rows = [row for row in rows if self._draft_length(row) > 0]
        self._read_steps(rows)
        rows = [row for row in rows if self._read.get(row.slot) == _state_of(row)]
        if not rows:
            return set()
        length = max(map(self._draft_length, rows))
        starts = [DraftStart(row.slot, len(row.tokens), row.params, row.adapter_slot or 0) for row in rows]
        for row, choices in zip(rows, self._heads.propose(starts, length, self._ranks), strict=True):
            self._offer(row, choices)
        if self._heads.stepwise:  # otherwise a longer draft takes no longer
            further_s = self._heads.further_s
            self.delay = Delay(max(time.perf_counter() - began_s - (length - 1) * further_s, 0.0), further_s)
        return {row.key for row in rows}

    def note_step(self, writers: Sequence[TargetRow | None], inputs: Sequence[Sequence[RowInput]]) -> None:
        """Note what a forward ran. writers: the row of each share, if it writes a text of its own."""
        self._unread.clear()
        self._hidden = self._runner.hidden
        counts = [sum(len(run.tokens) for run in runs) for runs in inputs]
        firsts = [0, *accumulate(counts)]
        ends = accumulate((sum(run.logits_count for run in runs) for runs in inputs), initial=0)
        self._ran = [
            _Ran(row, runs[0].start, first, end + runs[0].logits_count)
            for row, runs, first, end in zip(writers, inputs, firsts, ends, strict=False)
            if row is not None and not row.spans_replicas and row.drafts.heads
        ]

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Let the heads read the prompts of the last forward, and note what else they have to read of it.

        Accepted tokens are in the columns of the text now.
        """
        ran, self._ran = self._ran, []
        judged = {v.row.key: (v, verdict) for v, verdict in zip(verifications, verdicts, strict=True)}
        readings: list[Reading] = []
        for row, start, first, wanted_end in ran:
            if self._rows.get(row.key) is not row or row.slot < 0:
                continue
            rows, last_row, step_tokens = list(range(row.cached - start)), None, 0
            if row.key in judged:
                verification, verdict = judged[row.key]
                wanted = verdict.logits_rows()
                if wanted_end - len(verification.rows) + wanted[-1] >= 0:
                    last_row = wanted_end - len(verification.rows) + wanted[-1]
                if len(wanted) > 1:  # a step with a draft; after a prompt, the last chunk's tokens count
                    rows = wanted
                step_tokens = len(wanted)
                self._learn(row)
            following = row.tokens[start + 1 : start + 1 + len(rows)]
            layers_rows = [first + index for index in rows]
            token, adapter = row.tokens[start], row.adapter_slot or 0
            reading = Reading(row.slot, start, following, layers_rows, last_row, token, adapter)
            if len(rows) <= step_tokens:
                self._unread[row.slot] = _Unread(_state_of(row), reading)
                continue
            if step_tokens:
                self._read[row.slot] = _state_of(row)
            readings.append(reading)
        self._run_readings(readings)

    def _read_steps(self, rows: Sequence[TargetRow]) -> None:
        """Let the heads read what the last forward ran of rows that are to get drafts."""
        readings: list[Reading] = []
        for row in rows:
            unread = self._unread.pop(row.slot, None)
            if unread is not None and unread.state == _state_of(row):
                self._read[row.slot] = unread.state
                readings.append(unread.reading)
        self._run_readings(readings)

    def _run_readings(self, readings: Sequence[Reading]) -> None:
        if readings and self._hidden is not None:
            self._heads.read(readings, self._hidden)

    def remove(self, row: Row) -> None:
        self._guesses.pop(row.key, None)

    def _draft_length(self, row: TargetRow) -> int:
        """Return how many positions to draft for a row. The length does not depend on what is drawn."""
        if not row.drafts.heads:
            return 0
        most = min(self._heads.length, row.drafts.model_length)
        return min(most, row.drafts.in_step_length) if self._heads.stepwise else most

    def _offer(self, row: TargetRow, choices: Sequence[DraftChoice]) -> None:
        choices = choices[: self._draft_length(row)]
        base, kind = len(row.tokens), self._heads.kind
        self._guesses[row.key] = _Guess(base, choices)
        if row.rejects:
            tokens = [choice.tokens[0] for choice in choices]
            row.drafts.trie.offer(base, tokens, distributions=[choice.drawn_from for choice in choices], proposer=kind)
            return
        levels = [
            Candidates(choice.tokens, self._calibration(row, depth).probabilities(choice.gap)[: len(choice.tokens)])
            for depth, choice in enumerate(choices)
        ]
        if self._heads.tree is None:
            draft = best_tree(levels, row.drafts.model_length, chained=self._heads.chained)
        else:
            draft = tree_of(levels, self._heads.tree)
        row.drafts.trie.offer(base, draft.tokens, draft.parents, draft.probabilities, proposer=kind)

    def _learn(self, row: TargetRow) -> None:
        """Compare the row's candidates with the target's tokens, as far as these follow candidates."""
        guess = self._guesses.pop(row.key, None)
        if guess is None or row.rejects:
            return
        for depth, (choice, token) in enumerate(zip(guess.choices, row.tokens[guess.base :], strict=False)):
            rank = choice.tokens.index(token) if token in choice.tokens else None
            self._calibration(row, depth).note(choice.gap, rank)
            if rank is None or (rank and self._heads.chained):
                break

    def _calibration(self, row: TargetRow, depth: int) -> RankCalibration:
        return self._calibrations[row.params.greedy, depth]


def _state_of(row: TargetRow) -> tuple[RowKey, int]:
    return row.key, len(row.tokens)
