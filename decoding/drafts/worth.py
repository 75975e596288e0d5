"""Whether it pays to ask a proposer that delays the step. Pure arithmetic on measured means."""

from math import sqrt

_SMOOTHING = 0.02  # weight of the newest verdict in running means
_LEAST_STEPS, _LEAST_VERDICTS = 4, 6  # a trial decides after so many steps, and verdicts on rows
_TRIAL_VERDICTS = 32  # until there are so many, they are doubted:
_DOUBT_TOKENS = 1.0  # steps may commit so much more, over the root of the number of verdicts
_PROVEN_VERDICTS = 256  # after so many it was worth it, and its next rest is a short one
_FIRST_REST, _LONGEST_REST = 64, 4096  # steps …
_GROWTH = 4  # … and the factor on the next rest, unless the proposer proves its worth before


class ProposerWorth:
    """Compares the tokens that a proposer adds to the text with what else its time would bring."""

    def __init__(self) -> None:
        self._gained, self._committed = 0.0, 1.0  # running means of what `note_step` gets
        self._rest = 0  # steps that are left
        self._next_rest = _FIRST_REST
        self._steps = self._verdicts = 0  # of the trial and since

    @property
    def verdicts(self) -> int:
        """Number of verdicts on rows that the estimates come from, since the trial began."""
        return self._verdicts

    @property
    def rests(self) -> bool:
        """Whether it must not be asked now."""
        return self._rest > 0

    def note_step(self, gained: float, committed: float, rows: int) -> None:
        """Learn from a step with its drafts. Means over the step's rows, whether it drafted for them or not.

        Args:
            gained: tokens that would not have been committed without it.
            committed: all tokens.
            rows: for which it drafted.
        """
        self._steps += 1
        self._verdicts += rows
        weight = max(rows / self._verdicts, 1 - (1 - _SMOOTHING) ** rows)
        self._gained += weight * (gained - self._gained)
        self._committed += weight * (committed - self._committed)
        if self._verdicts >= _PROVEN_VERDICTS:
            self._next_rest = _FIRST_REST

    def rest(self) -> None:
        """Begin to rest. Each rest is longer than the last."""
        self._rest = self._next_rest
        self._next_rest = min(_GROWTH * self._next_rest, _LONGEST_REST)

    def begin_trial(self) -> None:
        """Forget what the last trial and the time since have shown."""
        self._steps = self._verdicts = 0

    def note_rest(self) -> None:
        """Count a step without a call."""
        self._rest -= 1

    def pays(self, call_s: float, step_s: float) -> bool:
        """Whether steps with its drafts commit more tokens per second. call_s: of asking it. step_s: without it."""
        if self._verdicts < _LEAST_VERDICTS or self._steps < _LEAST_STEPS:
            return True
        doubt = _DOUBT_TOKENS / sqrt(self._verdicts) if self._verdicts < _TRIAL_VERDICTS else 0.0
        return (self._committed + doubt) / (step_s + call_s) > self.speed_without(step_s)

    def speed_without(self, step_s: float) -> float:
        """Return the tokens per second and row of steps without it."""
        return (self._committed - self._gained) / step_s
