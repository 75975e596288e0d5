"""Which proposers of a mixture pay for the time by which they delay the step. Pure arithmetic on measured means."""

from collections import defaultdict
from collections.abc import Mapping
from math import sqrt

from decoding.drafts.draft import ProposerName

_SMOOTHING = 0.005  # weight of the newest verdict in running means
_LEAST_STEPS, _LEAST_VERDICTS = 4, 8  # of a trial
_FIRST_REST, _LONGEST_REST, _REST_GROWTH = 128, 4096, 3  # steps
_KEPT_VERDICTS = 16  # the most that what is known before a trial weighs in it
_DOUBT_TOKENS = 1.0  # steps may commit so much more than was seen, over the root of the number of verdicts
_PROVEN_VERDICTS = 256  # after so many without a rest, the next is a short one


class MixtureWorth:
    """Compares the tokens that each proposer adds to the others' with what else its time would bring.

    At most one of them rests at a time. After its rest all are tried again. Rests get longer and longer: while little
    is known, chance decides on few steps, and later, trials cost little.
    """

    def __init__(self) -> None:
        self.resting: ProposerName | None = None
        self._rest_steps = 0  # that are left
        self._committed = 1.0  # running means of what `note_step` gets
        self._gained: defaultdict[ProposerName, float] = defaultdict(float)
        self._weight = 0.0  # of these means, in verdicts
        self._steps = self._verdicts = 0  # since the trial began
        self._next_rest = _FIRST_REST

    def note_step(self, gained: Mapping[ProposerName, float], committed: float, rows: int) -> None:
        """Learn from a step with drafts of all. Means over the step's rows, whether they drafted for them or not.

        Args:
            gained: tokens that would not have been committed without this proposer.
            committed: all tokens.
            rows: for which there were drafts.
        """
        self._steps += 1
        self._verdicts += rows
        self._weight += rows
        weight = max(rows / self._weight, 1 - (1 - _SMOOTHING) ** rows)
        self._committed += weight * (committed - self._committed)
        for name, tokens in gained.items():
            self._gained[name] += weight * (tokens - self._gained[name])
        if self._verdicts >= _PROVEN_VERDICTS:
            self._next_rest = _FIRST_REST

    def choose(self, calls_s: Mapping[ProposerName, float], step_s: float) -> None:
        """Let the proposer rest without which steps commit more tokens per second, if there is one.

        calls_s: of asking each. step_s: of a step without them.
        """
        if self._steps < _LEAST_STEPS or self._verdicts < _LEAST_VERDICTS:
            return
        all_s = step_s + sum(calls_s.values())
        without = {name: (self._committed - self._gained[name]) / (all_s - call_s) for name, call_s in calls_s.items()}
        doubt = _DOUBT_TOKENS / sqrt(self._weight)
        idle = max(without, key=lambda name: without[name])
        if without[idle] > (self._committed + doubt) / all_s:
            self.resting, self._rest_steps = idle, self._next_rest
            self._next_rest = min(_REST_GROWTH * self._next_rest, _LONGEST_REST)

    def note_rest(self) -> None:
        """Count a step without the one that rests. After the last, begin a trial."""
        self._rest_steps -= 1
        if not self._rest_steps:
            self.resting = None
            self._steps = self._verdicts = 0
            self._weight = min(self._weight, _KEPT_VERDICTS)
