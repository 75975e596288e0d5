"""Compares speculative with plain decoding by the clock, because a cost model misses contention.

A drafter may share cores, memory bandwidth or a GPU with the target, and clients may be slow. Both modes are measured
one right after the other, because the machine's own speed changes, too. A trial begins when the time that it may lose
has been earned, and ends when that is lost. One or two rows begin with drafts, larger batches in plain mode. The time
that drafters need to catch up counts as a loss, too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

_SETTLING_STEPS = 3  # until drafters have caught up, or rest; at most four times as many
_TRIAL_STEPS = 2 * _SETTLING_STEPS  # a settled window tells a speed after so many steps …
_TRIAL_TOKENS = 48  # … and so many tokens, if it speculates: their number per step is random …
_CLEARLY_SLOWER = 0.85  # … or after half as many of both below this speed ratio
_BUDGET = 0.01  # the share of the time that trials of the slower mode may lose
_TRIED_AT_ONCE = 1  # powers of two: so few rows begin with drafts however slow a step is, since they leave it idle time
_FIRST_S = 0.2  # what the first trial of a size may lose before it is earned: 0.7 % of the first half minute
_DRAFTING = 1.2  # factor on the cost of a step that verifies drafts, since making them takes time, too
_MAX_CREDIT = 4.0  # first trials: the most that is kept
_PATIENCE = 1.5  # multiple of the expected loss at which a trial is broken off; the next one may lose so much more
_MIN_PAUSE_S, _MIN_PAUSE = 0.5, 4.0  # between trials: seconds, and times the length of the last trial
_GROWTH = {True: 4.0, False: 2.0}  # factor on the pause after each clear trial, by whether speculation is in use
_MAX_PAUSE_S = {True: 120.0, False: 30.0}  # a loss shows while speculation is in use; a gain shows only in a trial
_CHANGED = 0.95  # of the tokens a step in the last trial: below that, or the plain speed, no long pause is made
_MAX_CLEAR = 20  # trials are counted
# So many first trials that agree with none may have met a hiccup. If so short, they are soon repeated, whatever they
# seemed to lose.
_REPEATED, _REPEATED_S = 2, 0.15
_MAX_STEP = 4.0  # step times are clipped at so many times the recent minimum
_RISING = 1.02  # factor per step on that minimum, so that it is forgotten
_MAX_LOSS = 2.0  # losses are clipped at so many times the expected time, and the time to catch up
_CATCH_UP_SHARE = 0.3  # of the time that the target would need to read what drafters have missed, before it is measured
_SMOOTHING = 0.6  # weight of the newest time to catch up
_FADING = 0.95  # factor per step on the times of earlier ones
_MEMORY_TOKENS = 350  # of which tokens a step are the mean
_STEP_VARIANCE, _TOKEN_VARIANCE = 0.005, 1.0  # of the logarithm of a speed: by times; by tokens, over their number
_DRIFT = 0.01 / 60  # variance that a gain gets per second without a trial
_CLEAR = 2.0  # standard errors: a gain so large is clear; a trial so far from the earlier ones counts as so far
_INHERITED = 1  # powers of two between sizes of which the smaller's gain says something about the larger's
_SHORT_VISIT_STEPS = 4 * (_SETTLING_STEPS + _TRIAL_STEPS)  # with batches of one size: too few for a trial
_SIZE_TOLERANCE = 0.75  # in powers of two: batches this near count as of one size, so that sizes don't alternate


@dataclass(slots=True)
class _Window:
    """Consecutive steps in one mode. Its speed is relative to the expected one of plain decoding."""

    speculating: bool
    trying: bool  # whether this is a trial of the mode that is not in use
    settled: bool = False
    catch_up_s: float = 0.0  # what drafters need at most until they draft again
    steps: int = 0  # since it settled, or before that, since it began
    drafted_steps: int = 0  # since it settled
    tokens: float = 0.0  # of the last steps, like `work_s` and `plain_s`
    work_s: float = 0.0  # expected seconds of plain decoding for the same tokens …
    plain_s: float = 0.0  # … and for as many steps
    expected_s: float = 0.0  # of plain steps, of fewer of the last steps, like `seconds`
    seconds: float = 0.0
    shortest: float = math.inf  # of the last steps: a step's seconds over the expected ones of a plain step
    total_s: float = 0.0  # since it began, like `total_work_s`
    total_work_s: float = 0.0

    def note(self, tokens: int, work_s: float, seconds: float, *, plain_s: float, drafted: bool, offered: bool) -> None:
        """plain_s: expected seconds of a plain step of these rows, with its prompts."""
        self.shortest = min(_RISING * self.shortest, seconds / plain_s)
        seconds = min(seconds, _MAX_STEP * self.shortest * plain_s + (0.0 if self.settled else self.catch_up_s))
        self.steps += 1
        self.total_s += seconds
        self.total_work_s += work_s
        if not self.settled:
            drafters_follow = drafted if self.speculating else not offered
            late = self.steps >= 4 * _SETTLING_STEPS and self.total_s >= self.catch_up_s
            self.settled = late or (drafters_follow and self.steps >= _SETTLING_STEPS)
            self.steps *= not self.settled
            return
        self.drafted_steps += drafted
        kept = math.exp(-tokens / _MEMORY_TOKENS)
        self.tokens = kept * self.tokens + tokens
        self.work_s = kept * self.work_s + work_s
        self.plain_s = kept * self.plain_s + plain_s
        self.expected_s = _FADING * self.expected_s + plain_s
        self.seconds = _FADING * self.seconds + seconds

    @property
    def speed(self) -> float:
        """The mean of tokens a step is over more steps than that of times, which depend on the machine."""
        return self.tokens_per_step * self.expected_s / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.work_s / self.plain_s

    @property
    def variance(self) -> float:
        return _STEP_VARIANCE + (_TOKEN_VARIANCE / self.tokens if self.speculating else 0.0)

    def inherit(self, other: "_Window") -> None:
        """Go on with the tokens a step of an earlier window."""
        self.tokens, self.work_s, self.plain_s = other.tokens, other.work_s, other.plain_s

    def has_shown_enough(self, other_speed: float) -> bool:
        """Whether its speed can be told from the other mode's."""
        if not self.settled or self.seconds == 0:
            return False
        steps, tokens = (self.drafted_steps, self.tokens) if self.speculating else (self.steps, _TRIAL_TOKENS)
        shows_half = 2 * steps >= _TRIAL_STEPS and 2 * tokens >= _TRIAL_TOKENS
        is_slower = shows_half and self.speed < _CLEARLY_SLOWER * other_speed
        return is_slower or (self.steps >= _TRIAL_STEPS and tokens >= _TRIAL_TOKENS)

    def loss_s(self, better_speed: float) -> float:
        """Return the seconds that the better mode would have saved since the window began."""
        expected_s = self.total_work_s / better_speed
        return min(max(0.0, self.total_s - expected_s), _MAX_LOSS * expected_s + self.catch_up_s)


@dataclass(slots=True)
class _Evidence:
    """Results of the trials with batches of about one size."""

    log_gain: float = 0.0  # of the speed with speculation over that without …
    variance: float = 1.0  # … and of this estimate
    surprise: float = 0.0  # of the last trial, in standard errors
    tokens_per_step: float = 1.0  # of a row with drafts, in the last trial
    trials: int = 0  # with batches of this size; 0: `log_gain` is from batches of another size
    clear_trials: int = 0  # the last that left no doubt
    loss_s: dict[bool, float] = field(default_factory=dict)  # of the last lost trial, by whether it speculated

    def note(self, log_gain: float, variance: float, seconds: float) -> None:
        """Count a trial, as a Kalman filter does. Two that surprise in the same direction begin the mean anew.

        variance: of the logarithm. seconds: since the last trial.
        """
        self.trials += 1
        self.variance += _DRIFT * seconds
        news = log_gain - self.log_gain
        surprise = news / math.sqrt(self.variance + variance)
        if surprise * self.surprise > 1:
            self.variance = max(self.variance, variance)
        weight = self.variance / (self.variance + variance)
        most = _CLEAR * math.sqrt(self.variance + variance)
        self.log_gain += weight * max(-most, min(news, most))
        self.variance *= 1 - weight
        self.surprise = surprise
        is_clear = abs(self.log_gain) > _CLEAR * math.sqrt(self.variance) and abs(surprise) < _CLEAR
        self.clear_trials = min(self.clear_trials + 1, _MAX_CLEAR) if is_clear else 1


class SpeculationTrial:
    """A continued comparison of speculative with plain decoding on one target."""

    def __init__(
        self,
        plain_step_s: Callable[[int], float],
        *,
        draft_cost: Callable[[int], float] = lambda rows: 1.0,
        acceptance: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """
        plain_step_s: the expected seconds of a plain step, by rows.
        draft_cost: the time of a step that verifies a draft token of each row, relative to a plain one's, by rows.
        acceptance: the expected rate at which draft tokens are accepted.
        """
        self._expected_step_s, self._draft_cost, self._acceptance = plain_step_s, draft_cost, acceptance
        self._size = -1  # of current batches, as a power of two; -1: there was none
        self._visit_steps = 0  # consecutive steps at that size …
        self._away_steps = 0  # … and since then, of smaller batches
        self._evidence: dict[int, _Evidence] = {}
        self._window = _Window(speculating=False, trying=False)
        self._window_before: _Window | None = None  # the trial: of the mode in use
        self._plain_speed = 1.0  # when last measured
        self._credit_s = 0.0  # what trials may lose
        self._catch_up_s = 0.0  # as in `note`
        self._catch_up_share = _CATCH_UP_SHARE  # of `catch_up_s` that is lost
        self._since_trial_s = self._min_pause_s = 0.0
        self.trials = 0
        self.lost_s = 0.0  # by trials of the mode that proved slower

    def speculates(self, rows: int) -> bool:
        """Whether batches of so many rows are to use drafts now."""
        self._update_size(rows)
        return self._window.speculating

    @property
    def gain(self) -> float:
        """The speed of speculative over plain decoding with batches of the current size; 1 if unknown."""
        evidence = self._evidence.get(self._size)
        return 1.0 if evidence is None else math.exp(evidence.log_gain)

    @property
    def is_trying(self) -> bool:
        return self._window.trying

    @property
    def is_resting(self) -> bool:
        """Whether plain decoding is in use and drafters rest, so that steps show its undisturbed cost."""
        return not self._window.speculating and self._window.settled and not self._window.trying

    def note(
        self,
        rows: int,
        tokens: int,
        seconds: float,
        *,
        work_s: float,
        drafted: bool,
        offered: bool = False,
        idle: bool = False,
        catch_up_s: float = 0.0,
    ) -> None:
        """Count a step.

        Args:
            rows: active rows, those in prefill included.
            tokens: committed in the step, at least one.
            seconds: since the last step, with prefill, messages and the wait for drafts.
            work_s: estimated seconds of plain decoding for the same tokens and prefill, while drafters rest.
            drafted: whether the step verified draft tokens.
            offered: whether drafters offered drafts since the last step, so that they do not rest.
            idle: no proposer was at work, so the step is a plain one in either mode.
            catch_up_s: in plain mode, the most that drafters would need to catch up.
        """
        self._update_size(rows)
        self._count_visit(rows)
        if not self._window.speculating:
            self._catch_up_s = catch_up_s
        self._credit_s = min(self._max_credit_s, self._credit_s + _BUDGET * seconds)
        self._since_trial_s += seconds
        if idle and self._window.speculating:
            return
        window, was_settled = self._window, self._window.settled
        extra = max(0.0, tokens / rows - 1)  # tokens of a row, beyond the one of a plain step
        plain_s = max(work_s - extra * self._expected_step_s(rows), work_s / (1 + extra))
        window.note(tokens, work_s, seconds, plain_s=plain_s, drafted=drafted, offered=offered)
        if window.settled and not was_settled:
            self._learn_catch_up(window)
        if window.trying:
            assert self._window_before is not None
            if window.has_shown_enough(self._window_before.speed):
                self._close_trial(self._window_before)
            elif window.loss_s(self._window_before.speed) > self._may_lose_s:
                self._break_off()
        elif self._size not in self._evidence and window.speculating and window.loss_s(1.0) > self._may_lose_s:
            self._break_off()
        elif self._window_before is not None and window.settled and not was_settled:  # the first steps after a trial
            self._charge(not window.speculating, window.loss_s(self._window_before.speed))
            self._window_before = None
        elif self._may_try():
            self._window_before = window
            self._open(not window.speculating, trying=True)

    def _may_try(self) -> bool:
        window, evidence = self._window, self._evidence.get(self._size)
        if not window.has_shown_enough(self._plain_speed if window.speculating else 0.0):
            return False
        cost_s, credit_s = self._expected_loss_s, self._credit_s
        if evidence is None:
            return window.speculating or self._may_begin
        grown_s = self._min_pause_s * _GROWTH[window.speculating] ** (evidence.clear_trials - 1)
        pause_s = max(self._min_pause_s, min(grown_s, _MAX_PAUSE_S[window.speculating]))
        changed = window.tokens_per_step < _CHANGED * evidence.tokens_per_step
        if window.speculating and (changed or window.speed < self._plain_speed):
            pause_s = self._min_pause_s  # drafts may have ceased to pay
            if window.speed < _CLEARLY_SLOWER * self._plain_speed:
                cost_s = -math.inf
        if window.speculating and evidence.clear_trials == 1 and evidence.trials <= _REPEATED:
            cost_s = -math.inf if self._unknown_loss_s <= _REPEATED_S else cost_s
        return self._since_trial_s >= pause_s and credit_s >= cost_s

    @property
    def _expected_catch_up_s(self) -> float:
        return self._catch_up_share * (self._window.catch_up_s if self._window.speculating else self._catch_up_s)

    def _learn_catch_up(self, window: _Window) -> None:
        """Learn how much of the expected time to catch up is lost, if that is more than a few steps."""
        speed = self._plain_speed if self._window_before is None else self._window_before.speed
        expected_s = window.total_work_s / speed
        if window.catch_up_s > expected_s:
            share = min(max(0.0, window.total_s - expected_s) / window.catch_up_s, 1.0)
            self._catch_up_share += _SMOOTHING * (share - self._catch_up_share)

    @property
    def _expected_loss_s(self) -> float:
        """The seconds that a trial of the mode that is not in use may lose: as much as the last one lost."""
        evidence = self._evidence.get(self._size)
        begins = evidence is None and self._window.speculating  # the drafts that rows begin with are on trial, too
        tried = self._window.speculating == (self._window.trying or begins)
        unknown_s = 0.0 if evidence is not None and evidence.trials else self._unknown_loss_s
        if not tried:
            unknown_s *= abs(1 - 1 / self.gain)  # plain decoding loses only what drafts are thought to save
        loss_s = unknown_s if evidence is None else evidence.loss_s.get(tried, unknown_s)
        return min(loss_s + self._expected_catch_up_s, self._max_credit_s)

    @property
    def _may_begin(self) -> bool:
        """Whether to speculate with batches of a size that was never tried."""
        may_pay = 1 + self._acceptance() > _DRAFTING * self._draft_cost(2**self._size)
        credit_s = self._credit_s + _FIRST_S if may_pay else self._credit_s
        return self._size <= _TRIED_AT_ONCE or credit_s >= self._unknown_loss_s + self._expected_catch_up_s

    @property
    def _unknown_loss_s(self) -> float:
        return _TRIAL_STEPS * self._expected_step_s(2 ** max(self._size, 0))

    @property
    def _may_lose_s(self) -> float:
        return max(self._credit_s, _PATIENCE * max(self._expected_loss_s, _FIRST_S))

    @property
    def _max_credit_s(self) -> float:
        return _MAX_CREDIT * self._unknown_loss_s + self._expected_catch_up_s

    def _break_off(self) -> None:
        """End a trial that has lost too much before it showed anything."""
        trial, before = self._window, self._window_before
        most_s = self._may_lose_s + trial.catch_up_s  # the rest was no fault of the trial
        evidence = self._evidence.setdefault(self._size, _Evidence())
        evidence.loss_s.pop(trial.speculating, None)
        if not trial.settled:
            self._learn_catch_up(trial)
        self._charge(trial.speculating, min(trial.loss_s(1.0 if before is None else before.speed), most_s))
        evidence.loss_s[trial.speculating] *= _PATIENCE
        evidence.clear_trials = min(evidence.clear_trials + 1, _MAX_CLEAR)
        if before is not None and not trial.speculating and not evidence.trials:  # else it would seem to gain nothing
            evidence.log_gain = math.log(before.speed * trial.total_s / trial.total_work_s)
        self._end_trial(winner=not trial.speculating)

    def _close_trial(self, before: _Window) -> None:
        """Learn from the trial, and go on with the faster mode. before: the window before the trial."""
        trial = self._window
        evidence = self._evidence.setdefault(self._size, _Evidence())
        log_ratio = math.log(trial.speed / before.speed)
        log_gain = log_ratio if trial.speculating else -log_ratio
        if before.speculating and evidence.trials:  # tokens tell at once what has changed
            evidence.log_gain += math.log(before.tokens_per_step / evidence.tokens_per_step)
        evidence.note(log_gain, trial.variance + before.variance, self._since_trial_s)
        speculative, self._plain_speed = (trial, before.speed) if trial.speculating else (before, trial.speed)
        evidence.tokens_per_step = speculative.tokens_per_step
        self.trials += 1
        winner = evidence.log_gain > 0
        if winner != trial.speculating:
            evidence.loss_s.pop(trial.speculating, None)
            self._charge(trial.speculating, trial.loss_s(before.speed))
        self._end_trial(winner=winner)
        if winner == trial.speculating:
            self._window_before = None

    def _end_trial(self, *, winner: bool) -> None:
        """Go on with the better mode, and begin the pause. winner: whether it speculates."""
        self._since_trial_s, self._min_pause_s = 0.0, max(_MIN_PAUSE_S, _MIN_PAUSE * self._window.total_s)
        last = self._window if self._window.speculating == winner else self._window_before
        self._open(winner, trying=False)
        if last is not None:
            self._window.inherit(last)

    def _charge(self, tried: bool, loss_s: float) -> None:
        loss_by_mode = self._evidence[self._size].loss_s
        catch_up_s = self._catch_up_share * self._window.catch_up_s
        loss_by_mode[tried] = loss_by_mode.get(tried, 0.0) + max(0.0, loss_s - catch_up_s)
        self._credit_s -= loss_s
        self.lost_s += loss_s

    def _open(self, speculating: bool, *, trying: bool) -> None:
        """Begin a window. It is settled if it continues in the same mode."""
        same = speculating == self._window.speculating
        catch_up_s = self._catch_up_s if speculating and not same else 0.0
        self._window = _Window(speculating, trying, self._window.settled and same, catch_up_s)
        if self._size not in self._evidence:  # the first steps may have to wait for what is made once
            self._window.shortest = 1.0

    def _update_size(self, rows: int) -> None:
        """If the size has changed, use the mode that won at that size, or at the nearest size with evidence.

        Where sizes alternate too fast for trials, batches count as of the largest.
        """
        size = math.log2(rows)
        if abs(size - self._size) <= _SIZE_TOLERANCE:
            return
        if size < self._size and max(self._visit_steps, self._away_steps) < _SHORT_VISIT_STEPS:
            return
        self._visit_steps = self._away_steps = 0
        self._size, self._window_before = round(size), None
        if self._size not in self._evidence:
            self._inherit()
        evidence = self._evidence.get(self._size)
        self._open(self._may_begin if evidence is None else evidence.log_gain > 0, trying=False)

    def _count_visit(self, rows: int) -> None:
        """Count a step at the current size, or away from it."""
        if abs(math.log2(rows) - self._size) > _SIZE_TOLERANCE:
            self._away_steps += 1
        elif self._away_steps:
            self._visit_steps, self._away_steps = 1, 0
        else:
            self._visit_steps += 1

    def _inherit(self) -> None:
        """Estimate the gain of a new size by that of the nearest and the cost of verification at both."""
        nearest = min(self._evidence, key=lambda other: abs(other - self._size), default=None)
        if nearest is None:
            return
        log_gain = self._evidence[nearest].log_gain
        log_gain += math.log(self._draft_cost(2**nearest) / self._draft_cost(2**self._size))
        if abs(nearest - self._size) <= _INHERITED or (nearest > self._size) == (log_gain > 0):
            self._evidence[self._size] = _Evidence(log_gain)
