"""Asks the proposers that delay the step, a colocated drafter and heads, if what each adds is worth its time.

Knows nothing of how they draft.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from actors.target.judge import Verdict
from actors.target.row import TargetRow, Verification
from decoding.drafts.trie import ProposerName
from decoding.drafts.worth import ProposerWorth

_SMOOTHING = 0.1  # weight of the newest value


class StepProposer(Protocol):
    """Drafts for all rows before a step, on the target's device."""

    name: ProposerName
    planned: bool  # whether the planner decides if it drafts, when it is the only proposer

    def drafts_for(self, row: TargetRow) -> bool:
        """Whether it drafts for this row at all."""
        ...

    def draft(self, rows: Sequence[TargetRow]) -> float:
        """Put drafts into the rows' tries. Returns the seconds that the draft tokens took; 0: there was none.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        ...


class StepProposers:
    """The proposers of one target that delay its step.

    A token counts for whoever offers it first, so the last to be asked shows what it adds to the others. It is the one
    that is known least.
    """

    def __init__(self, proposers: Sequence[StepProposer], *, adaptive: bool) -> None:
        """adaptive: ask those that pay; otherwise all."""
        self._proposers, self._adaptive = proposers, adaptive
        self._asked: list[StepProposer] = []  # before this step, in this order
        self._seconds = dict.fromkeys([proposer.name for proposer in proposers], 0.0)  # running means of a call
        self._worths: defaultdict[frozenset[ProposerName], dict[ProposerName, ProposerWorth]] = defaultdict(
            lambda: {proposer.name: ProposerWorth() for proposer in proposers}
        )  # by all that are asked, and which of them

    def draft(self, rows: Sequence[TargetRow], step_s: float) -> None:
        """Let those that pay put drafts into the rows' tries. step_s: the mean seconds of a step without them.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        self._asked = [each for each in self._proposers if any(each.drafts_for(row) for row in rows)]
        if self._adaptive:
            self._drop_idle(step_s)
        worths = self._worths[_names(self._asked)]
        self._asked = sorted(self._asked, key=lambda each: -worths[each.name].verdicts)
        for proposer in self._asked:
            seconds = proposer.draft([row for row in rows if proposer.drafts_for(row)])
            if seconds:
                self._seconds[proposer.name] += _SMOOTHING * (seconds - self._seconds[proposer.name])

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        """Learn from verdicts what the last one that was asked adds to the others."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        judged = asked[-1]
        worth = self._worths[_names(asked)][judged.name]
        for verification, verdict in zip(verifications, verdicts, strict=True):
            if judged.drafts_for(verification.row):
                path = [verification.draft.proposers[index] for index in verdict.path]
                without = path.index(judged.name) if judged.name in path else len(path)
                worth.note_verdict(len(path) - without, len(path) + 1)

    def _drop_idle(self, step_s: float) -> None:
        """Drop those that rest beside the others, as well as those that begin to."""
        while len(self._asked) > 1 or any(not each.planned for each in self._asked):
            worths = {each.name: self._worths[_names(self._asked)][each.name] for each in self._asked}
            if not any(worth.rests for worth in worths.values()):
                self._let_rest(worths, step_s)
            dropped = next((name for name, worth in worths.items() if worth.rests), None)
            if dropped is None:
                return
            worths[dropped].note_rest()
            self._asked = [each for each in self._asked if each.name != dropped]

    def _let_rest(self, worths: Mapping[ProposerName, ProposerWorth], step_s: float) -> None:
        """Let the one rest without which steps are fastest, if there are any that do not pay beside the others."""
        all_s = step_s + sum([self._seconds[name] for name in worths])
        without_s = {name: all_s - self._seconds[name] for name in worths}
        idle = [name for name, worth in worths.items() if not worth.pays(self._seconds[name], without_s[name])]
        if idle:
            worths[max(idle, key=lambda name: worths[name].speed_without(without_s[name]))].rest()
            for worth in worths.values():
                worth.verdicts = 0  # the next trial compares them anew


def _names(proposers: Sequence[StepProposer]) -> frozenset[ProposerName]:
    return frozenset([each.name for each in proposers])
