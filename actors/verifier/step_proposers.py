"""Asks the proposers that delay the step, a colocated drafter and heads, if what each adds is worth its time.

Knows nothing of how they draft.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from actors.loops.row import RowKey
from actors.verifier.row import TargetRow, Verification
from decoding.drafts.draft import ProposerName
from decoding.drafts.verification import Verdict
from decoding.drafts.worth import MixtureWorth

_SMOOTHING = 0.05  # least weight of the newest time in a running mean

_Mixture = tuple[tuple[ProposerName, ...], int]  # the proposers that are asked together, and the size of the step


class StepProposer(Protocol):
    """Drafts for all rows before a step, on the target's device."""

    name: ProposerName
    rests_alone: bool  # whether it may rest when it is the only one; if not, the planner weighs its time
    token_s: float  # seconds by which a draft token of all rows delayed the last step; 0 if it drafted none

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
    """The proposers of one target that delay its step."""

    def __init__(
        self, proposers: Sequence[StepProposer], note_drafting: Callable[[float], None], *, adaptive: bool
    ) -> None:
        """
        note_drafting: takes the seconds by which a draft token of all rows delays a step.
        adaptive: ask those that pay; otherwise all.
        """
        self._proposers, self._note_drafting, self._adaptive = proposers, note_drafting, adaptive
        self._asked: list[StepProposer] = []  # before this step
        self.resting: set[ProposerName] = set()  # that did not pay in the last step that had drafts
        self._size = 0  # of this step, as a power of two: with other numbers of rows, other proposers pay
        # Seconds of a call, by proposer and size.
        self._costs: defaultdict[tuple[ProposerName, int], _RunningMean] = defaultdict(_RunningMean)
        self._rows: set[RowKey] = set()  # that were to get drafts
        self._drafted: set[RowKey] = set()  # that got any; none while a proposer can't draft yet: it reads a prompt
        self._worths: defaultdict[_Mixture, MixtureWorth] = defaultdict(MixtureWorth)

    def skip(self, rows: Sequence[TargetRow]) -> None:
        """Draft nothing in this step. Those that rest come nearer to the end of their rest."""
        self._asked, self._size = [], len(rows).bit_length()
        for (_, size), worth in self._worths.items():
            if size == self._size and worth.resting is not None:
                worth.note_rest()

    def draft(self, rows: Sequence[TargetRow], step_s: float) -> None:
        """Let those that pay put drafts into the rows' tries.

        step_s: the expected seconds of a step without drafts.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        self._size = len(rows).bit_length()
        useful = self._asked = [each for each in self._proposers if any(each.drafts_for(row) for row in rows)]
        if self._adaptive:
            self._drop_idle(step_s)
        self.resting = {each.name for each in useful if each not in self._asked}
        self._rows = {row.key for row in rows}
        drafted: list[set[RowKey]] = []
        for proposer in self._asked:
            began_s = time.perf_counter()
            drafted.append(proposer.draft([row for row in rows if proposer.drafts_for(row)]))
            if drafted[-1]:  # one that reads a prompt, or drafts nothing at all, says nothing of the usual time
                self._cost(proposer).note(time.perf_counter() - began_s)
        self._drafted = set().union(*drafted) if all(drafted) else set()
        token_s = sum(proposer.token_s for proposer in self._asked)
        if token_s and self._drafted and all(self._cost(proposer).is_known for proposer in self._asked):
            self._note_drafting(token_s)

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from verdicts what each proposer that was asked adds to the others."""
        if not self._asked or not self._drafted:
            return
        gained = dict.fromkeys(_names(self._asked), 0)
        committed = rows = 0
        for (row, draft, *_), verdict in zip(verifications, verdicts, strict=True):
            if row.key in self._rows:
                path = verdict.accepted(draft.proposers) if draft.proposers else []
                for name in gained:
                    if (name,) in path:  # nobody else has offered these tokens, so the path would end before
                        gained[name] += len(path) - path.index((name,))
                committed += len(verdict.path) + 1
                rows += 1
        if rows:
            means = {name: tokens / rows for name, tokens in gained.items()}
            self._worth().note_step(means, committed / rows, len(self._drafted))

    def _drop_idle(self, step_s: float) -> None:
        """Drop the proposers that rest, and those that begin to because they don't pay beside the others."""
        while len(self._asked) > 1 or any(each.rests_alone for each in self._asked):
            worth = self._worth()
            if worth.resting is None:
                worth.choose({each.name: self._cost(each).value for each in self._asked}, step_s)
            if worth.resting is None:
                return
            self._asked = [each for each in self._asked if each.name != worth.resting]
            worth.note_rest()

    def _worth(self) -> MixtureWorth:
        return self._worths[_names(self._asked), self._size]

    def _cost(self, proposer: StepProposer) -> "_RunningMean":
        return self._costs[proposer.name, self._size]


class _RunningMean:
    """The mean of values, weighted towards recent ones. The first value is left out: a first call warms up."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    @property
    def is_known(self) -> bool:
        return self._count > 1

    def note(self, value: float) -> None:
        """Add a value."""
        if self._count:
            self.value += max(1 / self._count, _SMOOTHING) * (value - self.value)
        self._count += 1


def _names(proposers: Sequence[StepProposer]) -> tuple[ProposerName, ...]:
    return tuple([each.name for each in proposers])
