"""Whether a target speculates, which proposers draft, how many tokens are verified, and how long rows wait for drafts.

All of it is measured: speculative and plain decoding by the clock (`speculation_trial.py`), sets of proposers by their
time and what each adds (`proposers.py`), draft lengths by acceptance and the cost of steps.
"""

import time
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy

from actors.loops.row import RowKey
from actors.verifier.proposers import Delay, Proposer, ProposerChoice
from actors.verifier.rows import TargetRow, Verification
from actors.verifier.speculation_trial import SpeculationTrial
from actors.verifier.step_cost import StepCost, measure_step_cost
from decoding.drafts.draft import Draft, ProposerName
from decoding.drafts.length import AcceptanceEstimate, choose_draft_lengths, choose_draft_tokens
from decoding.drafts.verification import Verdict
from engine.model.runner import Runner

_PATIENCE = 1.5  # draft latencies that a row waits for a draft
_SMOOTHING = 0.1  # weight of the newest value in running means
# Factors per step on the estimates of the time that waiting and drafting take, so that both are tried again.
_DRIFT, _DELAY_DRIFT = 0.99, 0.997
_MOST_DELAY = 3.0  # a longer delay by drafting counts as so many times the usual one


class SpeculationPolicy:
    """The policy of one target. Without new samples, each estimate drifts back to where drafts are tried again."""

    def __init__(
        self, runner: Runner, proposers: Sequence[Proposer] = (), *, adaptive: bool, alternating: bool = False
    ) -> None:
        """
        proposers: all, those of other processes too.
        adaptive: ask the proposers that pay, for as many draft tokens as pay; otherwise all, and as the request allows.
        alternating: drafts are made between two steps, so their time adds to the step's.
        """
        self._adaptive, self._alternating = adaptive, alternating
        self._branching = runner.trees_are_exact
        self._proposers = proposers
        self._following = [each for each in proposers if each.delay is None]  # they delay no step
        delaying = [each for each in proposers if each.delay is not None]
        self._choice = ProposerChoice(delaying, adaptive=adaptive)
        self._acceptance = AcceptanceEstimate(forgetting=0.995)  # of all rows: expected of a new one
        self._step_cost_s = measure_step_cost(runner)
        self._round_cost_s = deepcopy(self._step_cost_s)  # of ensembles: until the last reply
        # Measured while drafters rest: steps, by whether they are rounds of ensembles, and prefill chunks.
        self._plain_cost_s = {leading: deepcopy(self._step_cost_s) for leading in (False, True)}
        self._first_cost_s = deepcopy(self._step_cost_s)  # not corrected by steps: times of two sizes can be compared
        self._prefill_cost_s = deepcopy(self._step_cost_s)
        steps = self._step_cost_s, self._round_cost_s, self._prefill_cost_s
        self._costs_s = *steps, *self._plain_cost_s.values(), self._first_cost_s
        # Since the last step: seconds of prefill, a drafter's too; those expected; and whether a draft was offered.
        self._prefilled_s, self._prefill_work_s, self._offered = 0.0, 0.0, False
        self._mean_step_s = self._step_cost_s(1)
        self.trial = self._new_trial()
        self.active_rows = 1  # that write texts; includes rows in prefill, which will run soon
        self._latency_token_s: float | None = None  # of a draft token that a row waits for
        self._delay: Delay | None = None  # of a step by its drafts

    def take_cost(self, step_cost: StepCost) -> None:
        """Go on from better measurements than the first. Trials begin anew: practice has slowed the steps until now."""
        for cost in self._costs_s:
            cost.replace(step_cost)
        self.trial = self._new_trial()

    def _new_trial(self) -> SpeculationTrial:
        return SpeculationTrial(
            self._plain_cost_s[False],
            draft_cost=lambda rows: self._first_cost_s(2 * rows) / self._first_cost_s(rows),
            acceptance=lambda: self.acceptance,
        )

    @property
    def acceptance(self) -> float:
        """The expected acceptance rate of a new row's drafts."""
        return self._acceptance.value

    @property
    def resting(self) -> Collection[ProposerName]:
        """The proposers that did not pay in the last step that had drafts."""
        return self._choice.resting

    def follow(self, rows: Sequence[TargetRow]) -> None:
        """Let proposers that delay no step draft for rows with new text at once."""
        for proposer in self._following:
            began_s = time.perf_counter()
            proposer.propose(rows)
            proposer.spent_s += time.perf_counter() - began_s

    def draft(self, rows: Sequence[TargetRow], *, wanted: bool) -> None:
        """Let the proposers that delay the step, as far as they pay, put drafts into the rows' tries.

        wanted: whether drafts are wanted at all; if not, none is asked.

        Raises:
            OutOfPagesError: as in `Runner.logits`.
        """
        if not wanted:
            self._choice.skip()
            return
        others_draft = any(each.drafts_for(row) for each in self._following for row in rows)
        trying = self._adaptive and self.trial.is_trying and not others_draft
        delay = self._choice.propose(rows, self._cost_s(rows)(len(rows)), trying=trying)
        if delay is not None and any(delay):
            self.note_drafting(delay)

    def choose_drafts(
        self, rows: Sequence[TargetRow], now_s: float, *, others: int = 0, drafting_s: float = 0.0
    ) -> list[Draft]:
        """Return as much of each row's draft as pays in this step.

        others: tokens of other rows in the same forward. drafting_s: seconds that drafting has taken.
        """
        drafts = [row.drafts.best(row.structure, branching=self._branching) for row in rows]
        for row, draft in zip(rows, drafts, strict=True):
            if row.drafts.incomplete_since_s is not None:  # the wanted draft did not come in time
                self._note_latency(row, now_s)
            row.drafts.expected &= bool(draft.tokens)  # a late drafter is not waited for until its next offer
        probabilities = [draft.probabilities for draft in drafts]
        if not self._adaptive or not any(probabilities):
            return drafts
        cost_s = self._cost_s(rows)
        counts = choose_draft_tokens(probabilities, lambda tokens: drafting_s + cost_s(tokens + others))
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def speculates(self) -> bool:
        return not self._adaptive or self.trial.speculates(self.active_rows)

    def plan(self, rows: Sequence[TargetRow], committed: Collection[RowKey], now_s: float) -> None:
        """Decide which draft each row of the next step should have. Rows that just committed begin to wait for it."""
        limits = [row.drafts.model_length if row.drafts.wanted else 0 for row in rows]
        useful = wanted = in_step = self._lengths(rows, limits)
        if self._latency_token_s:
            wanted = self._lengths(rows, limits, latency_s=self._latency_token_s)
            self._latency_token_s *= _DRIFT
        if self._delay is not None:
            first_s, further_s = self._delay
            in_step = self._lengths(rows, limits, latency_s=further_s, first_s=first_s, alternating=True)
            if self.speculates():
                self._delay = Delay(_DELAY_DRIFT * first_s, _DELAY_DRIFT * further_s)
        for row, *lengths in zip(rows, wanted, useful, in_step, strict=True):
            row.drafts.wanted_length, row.drafts.useful_length, row.drafts.in_step_length = lengths
            if not row.drafts.expected or self._alternating:
                continue
            if row.key in committed:
                row.drafts.wait(now_s, self._patience_s(row.drafts.wanted_length))
            elif row.drafts.incomplete_since_s is not None and row.drafts.is_complete:
                row.drafts.deadline_s = now_s

    def note_verdict(self, row: TargetRow, *, drafted: int, accepted: int) -> None:
        row.drafts.note_verdict(drafted=drafted, accepted=accepted)
        self._acceptance.note(drafted=drafted, accepted=accepted)

    def learn(self, verifications: Sequence[Verification], verdicts: Sequence[Verdict]) -> None:
        self._choice.learn(verifications, verdicts)
        for proposer in self._proposers:
            proposer.learn(verifications, verdicts)

    def note_step(self, tokens: int, seconds: float) -> None:
        """Learn from the time of a step over so many tokens, without chunks of prompts."""
        self._step_cost_s.note(tokens, seconds)
        self._mean_step_s += _SMOOTHING * (seconds - self._mean_step_s)

    def note_ensemble_round(self, tokens: int, seconds: float) -> None:
        """Learn from the time between the requests for logits and the last reply."""
        self._round_cost_s.note(tokens, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from the time of a forward over chunks of prompts alone, which drafters may slow down, too."""
        self._prefilled_s += seconds
        self._prefill_work_s += self._prefill_cost_s(tokens)
        if self.trial.is_resting:
            self._prefill_cost_s.note(tokens, seconds)

    def note_reading(self, seconds: float) -> None:
        """Learn from the time in which a colocated drafter read prompts: without drafts there would be none."""
        self._prefilled_s += seconds

    def note_round(
        self, rows: Sequence[TargetRow], committed: int, seconds: float, *, drafted: bool, prompt_tokens: int = 0
    ) -> None:
        """Learn from a step, and the messages and the wait before it, which took `seconds` together.

        Args:
            rows: that verified drafts, or none.
            committed: tokens of all rows.
            drafted: whether the step verified drafts.
            prompt_tokens: in the same forward. What they add counts as expected work.
        """
        plain_cost_s = self._plain_cost_s[any(row.spans_replicas for row in rows)]
        is_typical = 2 * len(rows) > self.active_rows  # few rows say little about the cost of many
        with_prompts = len(rows) + prompt_tokens
        added_s = self._prefill_cost_s(with_prompts) - self._prefill_cost_s(len(rows))
        self._prefill_work_s += max(0.0, added_s)  # a delay of the machine may make fewer tokens look dearer
        if self._adaptive and is_typical and committed and any(row.drafts.wanted for row in rows):
            missed = sum([row.drafts.missed_tokens for row in rows]) if self.trial.is_resting else 0
            self.trial.note(
                self.active_rows,
                committed,
                self._prefilled_s + seconds,
                work_s=self._prefill_work_s + committed * plain_cost_s(len(rows)) / len(rows),
                drafted=drafted,
                offered=self._offered,
                idle=not (drafted or self._choice.drafted or any(row.drafts.drafter for row in rows)),
                catch_up_s=self._prefill_cost_s(missed) if missed else 0.0,
            )
            if self.trial.is_resting and not drafted:
                cost_s, tokens = (self._prefill_cost_s, with_prompts) if prompt_tokens else (plain_cost_s, len(rows))
                cost_s.note(tokens, seconds)
        self._prefilled_s, self._prefill_work_s, self._offered = 0.0, 0.0, False

    def note_drafting(self, delay: Delay) -> None:
        """Learn by how much drafts delay the step. Hiccups of the machine count little."""
        means = self._delay or delay
        first_s, further_s = (
            _smooth(mean, min(s, _MOST_DELAY * mean) if mean else s) for mean, s in zip(means, delay, strict=True)
        )
        self._delay = Delay(first_s, further_s)

    def note_offer(self, row: TargetRow, now_s: float, *, fits: bool = True) -> None:
        """Learn from an offer. If it fits the text, it may complete the draft that the row waits for."""
        self._offered = True
        if not fits:
            return
        row.drafts.expected = row.drafts.drafter and row.draft_length > 0
        if row.drafts.incomplete_since_s is not None and row.drafts.is_complete:
            self._note_latency(row, now_s)

    def _note_latency(self, row: TargetRow, now_s: float) -> None:
        """Learn the latency per draft token. A row that got none while it waited counts as half a token."""
        assert row.drafts.incomplete_since_s is not None
        tokens = max(row.drafts.length - row.drafts.length_at_plan, 0.5)
        self._latency_token_s = _smooth(self._latency_token_s, (now_s - row.drafts.incomplete_since_s) / tokens)
        row.drafts.incomplete_since_s = None

    def _lengths(
        self,
        rows: Sequence[TargetRow],
        limits: list[int],
        *,
        latency_s: float = 0.0,
        first_s: float | None = None,
        alternating: bool = False,
    ) -> list[int]:
        if not self._adaptive or not any(limits):
            return limits
        if not self.speculates():
            return [0] * len(rows)
        rates = [row.drafts.acceptance.value for row in rows]
        cost_s = self._cost_s(rows)
        return choose_draft_lengths(rates, limits, cost_s, latency_s, first_latency_s=first_s, alternating=alternating)

    def _cost_s(self, rows: Sequence[TargetRow]) -> Callable[[int], float]:
        """Return the cost of such rows' steps by tokens, each of which runs in all the texts of its row.

        With members in other replicas it lasts until the slowest one's reply.
        """
        cost_s = self._round_cost_s if any(row.spans_replicas for row in rows) else self._step_cost_s
        texts = sum([row.step_tokens for row in rows])
        return cost_s if texts == len(rows) else lambda tokens: cost_s(tokens * texts // len(rows))

    def _patience_s(self, draft_length: int) -> float:
        if self._latency_token_s is None:
            return self._mean_step_s
        return min(_PATIENCE * draft_length * self._latency_token_s, self._mean_step_s)


def _smooth(mean: float | None, value: float) -> float:
    """Return a running mean with one more value. mean: None if it is the first."""
    return value if mean is None else mean + _SMOOTHING * (value - mean)
