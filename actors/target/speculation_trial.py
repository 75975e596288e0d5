"""Whether speculation pays here and now, found out by trying: what no model of the costs can see, the clock can.

A drafter may share cores, memory bandwidth or a GPU with the target, clients may be slow, a first guess may be wrong.
So a target compares how fast it works with speculation and without. The two are measured one right after the other, as
the machine's own speed changes, too. What trials lose is counted, and comes out of a budget.
"""

import math
from dataclasses import dataclass, field

_SETTLING_STEPS, _MOST_SETTLING_STEPS = 3, 12  # until drafters have caught up, or rest
_TRIAL_STEPS = 6  # a window that has settled tells a speed after so many steps …
_TRIAL_TOKENS = 48  # … and so many tokens, if it speculates: their number per step is random
_FEWEST_STEPS, _FEWEST_TOKENS, _HOPELESS = 2, 16, 0.85  # a window that is so slow has shown enough sooner
_BUDGET = 0.01  # the share of the time that trials of the slower way may cost
_CREDIT_S = 0.4  # what may be spent beforehand: 1.3 % of the first half minute
_LEAST_PAUSE_S, _LEAST_PAUSE = 1.0, 4.0  # between trials: seconds, and times the length of the last one, …
_GROWTH = {True: 4.0, False: 2.0}  # … and so many times as long after each trial that says the same, …
_MOST_PAUSE_S = {True: 120.0, False: 30.0}  # … up to this: a loss shows while speculation is in use, a gain does not
_MOST_AGREEING = 20  # trials are counted
_MOST_LOSS = 2.0  # times what the work should have taken: what is beyond is a hiccup, and not the trial's
_SMOOTHING = 0.6  # weight of the newest trial
_FADING = 0.95  # of what was measured in use, per step: it is to be as recent as the trial
_NEAR = 0.75  # batches count as of the same size up to such a factor of two, so that sizes don't alternate


@dataclass(slots=True)
class _Window:
    """Steps that were taken in one way, speculative or plain, one after the other.

    Its speed is relative: the seconds that plain decoding should take for the same work, over those that it took. An
    error of that estimate is the same for both ways.
    """

    speculating: bool
    trying: bool  # the way that did not win last time
    settled: bool = False
    steps: int = 0  # since it has settled, or not yet
    drafted_steps: int = 0  # since it has settled, as are `tokens`, `work_s` and `seconds`
    tokens: int = 0
    work_s: float = 0.0  # that plain decoding should have taken
    seconds: float = 0.0
    lasted_s: float = 0.0  # from the beginning, as is `whole_work_s`
    whole_work_s: float = 0.0

    def note(self, tokens: int, work_s: float, seconds: float, *, drafted: bool, offered: bool) -> None:
        self.steps += 1
        self.lasted_s += seconds
        self.whole_work_s += work_s
        if not self.settled:
            as_meant = drafted if self.speculating else not offered
            self.settled = self.steps >= (_SETTLING_STEPS if as_meant else _MOST_SETTLING_STEPS)
            self.steps *= not self.settled
            return
        fading = 1.0 if self.trying else _FADING
        self.drafted_steps += drafted
        self.tokens += tokens
        self.work_s = fading * self.work_s + work_s
        self.seconds = fading * self.seconds + seconds

    @property
    def speed(self) -> float:
        return self.work_s / self.seconds

    def has_shown_enough(self, other_speed: float) -> bool:
        """Whether its speed can be told from the other way's."""
        if not self.settled or self.work_s == 0:
            return False
        steps, tokens = (self.drafted_steps, self.tokens) if self.speculating else (self.steps, _TRIAL_TOKENS)
        if steps >= _FEWEST_STEPS and tokens >= _FEWEST_TOKENS and self.speed < _HOPELESS * other_speed:
            return True
        return self.steps >= _TRIAL_STEPS and tokens >= _TRIAL_TOKENS

    def loss_s(self, better_speed: float) -> float:
        """Seconds that the better way would have saved, while drafters caught up or came to rest, too."""
        should_s = self.whole_work_s / better_speed
        return min(max(0.0, self.lasted_s - should_s), _MOST_LOSS * should_s)


@dataclass(slots=True)
class _Evidence:
    """What trials with batches of about one size have shown."""

    log_gain: float = 0.0  # of the speed with speculation over that without
    trials: int = 0  # with batches of this size; without any, the rest is from batches of another one
    agreeing: int = 0  # the last trials that said the same
    loss_s: dict[bool, float] = field(default_factory=dict)  # what the last lost trial cost, by the way that was tried

    def note(self, log_gain: float) -> None:
        self.trials += 1
        agrees = (log_gain > 0) == (self.log_gain > 0)
        self.agreeing = min(self.agreeing + 1, _MOST_AGREEING) if self.agreeing and agrees else 1
        self.log_gain += max(_SMOOTHING, 1 / self.trials) * (log_gain - self.log_gain)


class SpeculationTrial:
    """One target's standing contest between speculative and plain decoding."""

    def __init__(self) -> None:
        self._size = 0  # of batches now, as a power of two
        self._evidence: dict[int, _Evidence] = {}
        self._window = _Window(speculating=True, trying=False)
        self._used: _Window | None = None  # before the trial
        self._plain_speed = 1.0  # when last measured
        self._credit_s = _CREDIT_S
        self._since_trial_s = self._least_pause_s = 0.0
        self.trials = 0
        self.lost_s = 0.0  # by trials of the way that proved slower

    def speculates(self, rows: int) -> bool:
        """Whether batches of so many rows are to be speculated now."""
        self._look_at_size(rows)
        return self._window.speculating

    @property
    def gain(self) -> float:
        """How many times as fast as plain decoding speculation is with batches as they are now; 1: unknown."""
        evidence = self._evidence.get(self._size)
        return 1.0 if evidence is None else math.exp(evidence.log_gain)

    @property
    def is_trying(self) -> bool:
        """Whether decoding is as it is now only to find out how fast that is."""
        return self._window.trying

    @property
    def rests(self) -> bool:
        """Whether plain decoding has won, and drafters are at rest: what steps take now is what it costs."""
        return not self._window.speculating and self._window.settled and not self._window.trying

    def note(
        self, rows: int, tokens: int, seconds: float, *, work_s: float, drafted: bool, offered: bool = False
    ) -> None:
        """Count a step.

        Args:
            rows: in hand.
            tokens: committed by it.
            seconds: that it took, with the prompts and the wait before it.
            work_s: seconds that as many tokens and the same prompts take plain decoding, drafters at rest, estimated.
            drafted: whether there were draft tokens to verify.
            offered: whether drafts came in, by which drafters show that they are not at rest.
        """
        self._look_at_size(rows)
        self._credit_s = min(_CREDIT_S, self._credit_s + _BUDGET * seconds)
        self._since_trial_s += seconds
        window, was_settled = self._window, self._window.settled
        window.note(tokens, work_s, seconds, drafted=drafted, offered=offered)
        if window.trying:
            assert self._used is not None
            if window.has_shown_enough(self._used.speed):
                self._close_trial(self._used)
        elif self._used is not None and window.settled and not was_settled:  # it has come back from a trial
            self._charge(not window.speculating, window.loss_s(self._used.speed))
            self._used = None
        elif self._may_try():
            self._used = window
            self._open(not window.speculating, trying=True)

    def _may_try(self) -> bool:
        """Whether it is time for the other way."""
        window, evidence = self._window, self._evidence.get(self._size)
        if not window.has_shown_enough(self._plain_speed if window.speculating else 0.0):
            return False
        if evidence is None:
            return True
        cost_s = min(evidence.loss_s.get(not window.speculating, 0.0), _CREDIT_S)
        grown_s = self._least_pause_s * _GROWTH[window.speculating] ** (evidence.agreeing - 1)
        pause_s = max(self._least_pause_s, min(grown_s, _MOST_PAUSE_S[window.speculating]))
        if window.speculating and window.speed < _HOPELESS * self._plain_speed:  # a trial is more likely to gain
            cost_s, pause_s = -math.inf, self._least_pause_s
        return self._since_trial_s >= pause_s and self._credit_s >= cost_s

    def _close_trial(self, used: _Window) -> None:
        """Learn from the trial, and use what is faster. used: the window before it."""
        trial, first = self._window, not self._evidence
        evidence = self._evidence.setdefault(self._size, _Evidence())
        log_ratio = math.log(trial.speed / used.speed)
        evidence.note(log_ratio if trial.speculating else -log_ratio)
        self._plain_speed = used.speed if trial.speculating else trial.speed
        self._since_trial_s, self._least_pause_s = 0.0, max(_LEAST_PAUSE_S, _LEAST_PAUSE * trial.lasted_s)
        self.trials += 1
        winner = evidence.log_gain > 0
        if winner != trial.speculating:
            evidence.loss_s.pop(trial.speculating, None)
            self._charge(trial.speculating, trial.loss_s(used.speed))
        else:
            self._used = None
            if first:  # what came before it was a trial, too
                self._charge(used.speculating, used.loss_s(trial.speed))
        self._open(winner, trying=False)

    def _charge(self, tried: bool, loss_s: float) -> None:
        """Count what a lost trial has cost."""
        loss_by_way = self._evidence[self._size].loss_s
        loss_by_way[tried] = loss_by_way.get(tried, 0.0) + loss_s
        self._credit_s -= loss_s
        self.lost_s += loss_s

    def _open(self, speculating: bool, *, trying: bool) -> None:
        """Begin a window; one that goes on in the same way has settled."""
        settled = self._window.settled and speculating == self._window.speculating
        self._window = _Window(speculating, trying, settled)

    def _look_at_size(self, rows: int) -> None:
        """Go on with what won with batches of about as many rows; without any, with those nearest in size."""
        size = math.log2(rows)
        if abs(size - self._size) <= _NEAR:
            return
        if self._window.trying and self._used is not None and self._size in self._evidence:
            self._charge(self._window.speculating, self._window.loss_s(self._used.speed))
        self._size, self._used = round(size), None
        if not self._evidence:
            self._open(self._window.speculating, trying=False)
            return
        if self._size not in self._evidence:
            nearest = self._evidence[min(self._evidence, key=lambda other: abs(other - self._size))]
            self._evidence[self._size] = _Evidence(nearest.log_gain)
        self._open(self._evidence[self._size].log_gain > 0, trying=False)
