"""Asks the proposers that delay the step, a colocated drafter and heads, if what each adds is worth its time.

Knows nothing of how they draft.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.loops.row import RowKey
from actors.target.judge import Verdict
from actors.target.row import TargetRow, Verification
from decoding.drafts.draft import ProposerName
from decoding.drafts.worth import ProposerWorth

_SMOOTHING = 0.05  # weight of the newest time in a running mean


class StepProposer(Protocol):
    """Drafts for all rows before a step, on the target's device."""

    name: ProposerName
    rests_alone: bool  # whether it may rest when it is the only one; if not, the planner weighs its time

    def drafts_for(self, row: TargetRow) -> bool:
        """Whether it drafts for this row at all."""
        ...

    def draft(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Put drafts into the rows' tries. Returns the rows that got any.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        ...


class StepProposers:
    """The proposers of one target that delay its step.

    A token counts for the proposer that offers it first, so the last one asked shows what it adds to the others. The
    one with the fewest verdicts is asked last.
    """

    def __init__(self, proposers: Sequence[StepProposer], *, adaptive: bool) -> None:
        """adaptive: ask those that pay; otherwise all."""
        self._proposers, self._adaptive = proposers, adaptive
        self._asked: list[StepProposer] = []  # before this step, in this order
        self._costs = {proposer.name: _RunningMean(_SMOOTHING) for proposer in proposers}  # seconds of a call
        self._rows: set[RowKey] = set()  # that were to get drafts
        self._drafted: set[RowKey] = set()  # that the last one has drafted for
        self._worths: defaultdict[frozenset[ProposerName], dict[ProposerName, ProposerWorth]] = defaultdict(
            lambda: {proposer.name: ProposerWorth() for proposer in proposers}
        )  # by all that are asked, and which of them

    def draft(self, rows: Sequence[TargetRow], step_s: float) -> None:
        """Let those that pay put drafts into the rows' tries. No rows: nothing is drafted in this step.

        step_s: the mean seconds of a step without drafts.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        self._asked = [each for each in self._proposers if any(each.drafts_for(row) for row in rows)]
        if self._adaptive:
            self._drop_idle(step_s)
        worths = self._worths[_names(self._asked)]
        self._asked = sorted(self._asked, key=lambda each: -worths[each.name].verdicts)
        self._rows, self._drafted = {row.key for row in rows}, set()
        for proposer in self._asked:
            began_s = time.perf_counter()
            self._drafted = proposer.draft([row for row in rows if proposer.drafts_for(row)])
            self._costs[proposer.name].note(time.perf_counter() - began_s)

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from verdicts what the proposer that was asked last adds to the others."""
        if not self._asked or not self._drafted:
            return
        judged = self._asked[-1].name
        gained = committed = rows = 0
        for (row, draft, *_), verdict in zip(verifications, verdicts, strict=True):
            if row.key in self._rows:
                path = [draft.proposers[index] for index in verdict.path] if draft.proposers else []
                gained += len(path) - path.index(judged) if judged in path else 0
                committed += len(verdict.path) + 1
                rows += 1
        if rows:
            self._worths[_names(self._asked)][judged].note_step(gained / rows, committed / rows, len(self._drafted))

    def _drop_idle(self, step_s: float) -> None:
        """Drop the proposers that rest, and those that begin to because they don't pay beside the others."""
        while len(self._asked) > 1 or any(each.rests_alone for each in self._asked):
            worths = {each.name: self._worths[_names(self._asked)][each.name] for each in self._asked}
            if not any(worth.rests for worth in worths.values()):
                self._let_rest(worths, step_s)
            dropped = next((name for name, worth in worths.items() if worth.rests), None)
            if dropped is None:
                return
            worths[dropped].note_rest()
            self._asked = [each for each in self._asked if each.name != dropped]

    def _let_rest(self, worths: Mapping[ProposerName, ProposerWorth], step_s: float) -> None:
        """Among the proposers that don't pay beside the others, let the one rest without which steps are fastest."""
        calls_s = {name: self._costs[name].value for name in worths}
        without_s = {name: step_s + sum(calls_s.values()) - call_s for name, call_s in calls_s.items()}
        idle = [name for name, worth in worths.items() if not worth.pays(calls_s[name], without_s[name])]
        if idle:
            worths[max(idle, key=lambda name: worths[name].speed_without(without_s[name]))].rest()
            for worth in worths.values():
                worth.begin_trial()  # the next compares them anew


class _RunningMean:
    """The mean of values, weighted towards recent ones. The first value is left out: a first call warms up."""

    def __init__(self, smoothing: float) -> None:
        """smoothing: the least weight of a new value."""
        self.value = 0.0
        self._smoothing, self._count = smoothing, 0

    def note(self, value: float) -> None:
        """Add a value."""
        if self._count:
            self.value += max(1 / self._count, self._smoothing) * (value - self.value)
        self._count += 1


def _names(proposers: Sequence[StepProposer]) -> frozenset[ProposerName]:
    return frozenset([each.name for each in proposers])
