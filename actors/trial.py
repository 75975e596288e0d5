"""Whether speculation pays here and now, found out by trying: what no model of the costs can see, the clock can.

A drafter may share cores, memory bandwidth or a GPU with the target, clients may be slow, a first guess may be wrong.
So a target compares how fast it commits with speculation and without, for each size of batch. Rows come and go
meanwhile: so both are held against what plain decoding of the rows at hand should take.
"""

from collections import Counter
from dataclasses import dataclass, field

_TRIAL_TOKENS = {True: 48, False: 16}  # committed in a trial with speculation and without, and …
_TRIAL_STEPS = 6  # … the least number of steps
_SETTLING_STEPS = 3  # at the begin of a window: drafters catch up, or come to rest
_FEWEST_STEPS, _HOPELESS = 2, 0.85  # after so few steps with drafts, at such a speed, a trial has shown enough
_BUDGET = 0.01  # the share of the time that trials of the slower way may cost
_LEAST_PAUSE_S = 1.0  # between trials, but …
_LEAST_PAUSE = 4.0  # … never shorter than so many of them
_SMOOTHING = 0.3  # weight of the newest window, but the first few count alike
_PATIENCE = 4.0  # how much longer at most what has won again is used than the last time
_MARGIN = 1.2  # speculation that beats the estimate of plain decoding by that needs no trial


@dataclass(slots=True)
class _Contest:
    """Both ways of decoding batches of about one size.

    A way's speed is relative: the seconds that plain decoding should have taken, by the model of its costs, over those
    that it took. What the model has wrong is wrong for both ways.
    """

    speculating: bool = True  # in the current window
    steps: int = 0  # of the current window
    drafted_steps: int = 0  # of those that count, with draft tokens to verify
    tokens: int = 0
    plain_s: float = 0.0  # that plain decoding should have taken
    seconds: float = 0.0
    lasted_s: float = 0.0  # with the steps in which it settled
    speeds: dict[bool, float] = field(default_factory=dict)  # by whether it speculated
    windows: Counter[bool] = field(default_factory=Counter)  # that they come from
    trying: bool = True  # the current window is a trial, not the use of what won
    winner: bool | None = None  # last time
    pause_s: float = 0.0  # how long what won is used before the next trial

    def note(self, tokens: int, seconds: float, plain_s: float, *, drafted: bool) -> None:
        self.steps += 1
        self.lasted_s += seconds
        if self.steps > _SETTLING_STEPS:
            self.drafted_steps += drafted
            self.tokens += tokens
            self.plain_s += plain_s
            self.seconds += seconds

    def prefers_plain(self) -> bool:
        return len(self.speeds) == 2 and self.speeds[False] > self.speeds[True]

    def is_over(self) -> bool:
        if not self.trying:
            return self.seconds > self.pause_s
        tried = self.drafted_steps >= _FEWEST_STEPS and self.tokens >= _TRIAL_TOKENS[False]
        if tried and self.plain_s < _HOPELESS * self.seconds:
            return True
        enough_steps = self.steps >= _SETTLING_STEPS + _TRIAL_STEPS
        return enough_steps and self.tokens >= _TRIAL_TOKENS[self.speculating]

    def close(self) -> None:
        """Learn from the window that is over, and open the next."""
        speed = self.plain_s / self.seconds
        self.windows[self.speculating] += 1
        before = self.speeds.get(self.speculating, speed)
        weight = max(_SMOOTHING, 1 / self.windows[self.speculating])
        self.speeds[self.speculating] = before + weight * (speed - before)
        if self.speculating and speed > _MARGIN:
            self._use(True, pause_s=_LEAST_PAUSE_S)
        elif not self.trying or len(self.speeds) < 2:
            self._open(not self.speculating, trying=True)
        else:
            winner = max(self.speeds, key=self.speeds.__getitem__)
            lost_s = self.lasted_s * (1 - speed / self.speeds[winner])
            least_s = max(_LEAST_PAUSE_S, _LEAST_PAUSE * self.lasted_s)
            longest_s = _PATIENCE * self.pause_s if winner == self.winner else least_s
            self._use(winner, pause_s=max(least_s, min(lost_s / _BUDGET, longest_s)))

    def _use(self, winner: bool, *, pause_s: float) -> None:
        self._open(winner, trying=False)
        self.winner, self.pause_s = winner, pause_s

    def _open(self, speculating: bool, *, trying: bool) -> None:
        self.steps = _SETTLING_STEPS if speculating == self.speculating else 0
        self.drafted_steps, self.tokens, self.plain_s, self.seconds, self.lasted_s = 0, 0, 0.0, 0.0, 0.0
        self.speculating, self.trying = speculating, trying


class SpeculationTrial:
    """One target's standing contest between speculative and plain decoding."""

    def __init__(self) -> None:
        self._contests: dict[int, _Contest] = {}

    def speculates(self, rows: int) -> bool:
        """Whether batches of so many rows are to be speculated now."""
        return self._contest(rows).speculating

    def note(self, rows: int, tokens: int, seconds: float, *, plain_rate: float, drafted: bool) -> None:
        """Count a step.

        Args:
            rows: in hand.
            tokens: committed by it.
            seconds: since the step before, waiting included.
            plain_rate: tokens per second of steps without drafts over the rows that were in it, estimated.
            drafted: whether there were draft tokens to verify.
        """
        contest = self._contest(rows)
        contest.note(tokens, seconds, tokens / plain_rate, drafted=drafted)
        if contest.is_over():
            contest.close()

    def _contest(self, rows: int) -> _Contest:
        size = rows.bit_length()
        if size not in self._contests:
            self._contests[size] = self._like_nearest(size)
        return self._contests[size]

    def _like_nearest(self, size: int) -> _Contest:
        """A new contest; where batches of about the same size are better decoded plainly, it begins with that."""
        nearest = min(self._contests, key=lambda other: abs(other - size), default=None)
        contest = _Contest()
        if nearest is not None and self._contests[nearest].prefers_plain():
            contest.speculating = contest.trying = False
            contest.pause_s = _LEAST_PAUSE_S
        return contest
