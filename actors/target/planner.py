"""Decides how many draft tokens a target's rows verify, and how long they wait for them, from measured times."""

from collections.abc import Collection, Sequence
from copy import deepcopy

from actors.loops.row_table import RowKey
from actors.model.runner import Runner
from actors.target.row import TargetRow
from actors.target.speculation_trial import SpeculationTrial
from actors.target.step_cost import StepCost, measure_step_cost
from decoding.drafts.length import AcceptanceEstimate, choose_draft_lengths, choose_draft_tokens
from decoding.drafts.trie import Draft

_PATIENCE = 1.5  # how many usual draft latencies to wait for a draft
_SMOOTHING = 0.1  # weight of the newest value in running means
_DRIFT = 0.99  # of the latency estimate per step without news, so that waiting is tried again


class DraftPlanner:
    """One target's planner. No estimate is final: without news, each drifts back to where drafts are tried again."""

    def __init__(self, runner: Runner, *, adaptive: bool, alternating: bool = False) -> None:
        """
        adaptive: as many draft tokens as pay; otherwise always as many as the request allows.
        alternating: drafts are made between two steps, and cost the time that they take.
        """
        self._adaptive, self._in_turn = adaptive, alternating
        self._acceptance = AcceptanceEstimate(forgetting=0.995)  # of all rows: what to expect of a new one
        self._step_cost_s = measure_step_cost(runner)
        self._round_cost_s = deepcopy(self._step_cost_s)  # of leaders of ensembles: until the last member has answered
        # While drafters rest: of steps, by whether they are rounds of ensembles, and of chunks of prompts.
        self._plain_cost_s = {leading: deepcopy(self._step_cost_s) for leading in (False, True)}
        self._prefill_cost_s = deepcopy(self._step_cost_s)
        self._prefilled_s, self._prefill_work_s = 0.0, 0.0  # since the step before: as it was, and as it should be
        self._offered = False  # since the step before
        self._mean_step_s = self._step_cost_s(1)
        self._trial = SpeculationTrial()
        self.rows_in_hand = 1  # those whose prompts are still being processed included: they will run soon
        self._draft_token_s: float | None = None  # how long a missing draft token takes to come

    @property
    def acceptance(self) -> float:
        """What to expect of a new row's drafts."""
        return self._acceptance.value

    def choose(self, rows: Sequence[TargetRow], now_s: float) -> list[Draft]:
        """Of the drafts that are there, as much as pays in this step."""
        drafts = [row.best_draft() for row in rows]
        for row, draft in zip(rows, drafts, strict=True):
            if row.incomplete_since_s is not None:  # the wanted draft did not come in time
                self._note_latency(row, now_s)
            row.expects_drafts &= bool(draft.tokens)  # a drafter that is late is waited for once it offers
        if not self._adaptive:
            return drafts
        if not self.speculates():
            return [draft.first(0) for draft in drafts]
        counts = choose_draft_tokens([draft.probabilities for draft in drafts], self._cost_s(rows))
        return [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]

    def speculates(self) -> bool:
        """Whether drafts are wanted now."""
        return not self._adaptive or self._trial.speculates(self.rows_in_hand)

    @property
    def trial(self) -> SpeculationTrial:
        """Which of speculative and plain decoding is faster."""
        return self._trial

    def plan(self, rows: Sequence[TargetRow], committed: Collection[RowKey], now_s: float) -> None:
        """Decide what draft each row should have; those that just committed wait for it, but never longer than a step.

        rows: all that will be in the next step.
        """
        limits = [row.usable_draft_length if row.speculates else 0 for row in rows]
        wanted = self._lengths(rows, limits, latency_s=self._draft_token_s or 0.0)
        useful = wanted if self._in_turn else self._lengths(rows, limits, latency_s=0.0)
        if self._draft_token_s is not None:
            self._draft_token_s *= _DRIFT
        for row, wanted_length, useful_length in zip(rows, wanted, useful, strict=True):
            row.wanted_draft_length, row.useful_draft_length = wanted_length, useful_length
            if row.key in committed and not self._in_turn:
                row.await_draft(now_s, self._patience_s(wanted_length))

    def note_verdict(self, row: TargetRow, *, drafted: int, accepted: int) -> None:
        """Learn from what became of a row's draft."""
        row.acceptance.note(drafted=drafted, accepted=accepted)
        row.trie.default_probability = row.acceptance.value
        self._acceptance.note(drafted=drafted, accepted=accepted)

    def note_step(self, tokens: int, seconds: float) -> None:
        """Learn from a step over so many tokens."""
        self._step_cost_s.note(tokens, seconds)
        self._mean_step_s += _SMOOTHING * (seconds - self._mean_step_s)

    def note_answers(self, tokens: int, seconds: float) -> None:
        """Learn from a round of ensembles over so many tokens, from the question to the last answer."""
        self._round_cost_s.note(tokens, seconds)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from a chunk of prompts: what drafters take from the target makes this slower, too."""
        self._prefilled_s += seconds
        self._prefill_work_s += self._prefill_cost_s(tokens)
        if self._trial.rests:
            self._prefill_cost_s.note(tokens, seconds)

    def note_round(self, rows: Sequence[TargetRow], committed: int, seconds: float, *, drafted: bool) -> None:
        """Learn from a step and the wait before it, together so many seconds, in which the rows committed tokens.

        drafted: whether there were drafts in it.
        """
        plain_cost_s = self._plain_cost_s[any(row.ensemble is not None for row in rows)]
        several = 2 * len(rows) > self.rows_in_hand  # few rows say little about what many take
        if self._adaptive and several and any(row.speculates for row in rows):
            self._trial.note(
                self.rows_in_hand,
                committed,
                self._prefilled_s + seconds,
                work_s=self._prefill_work_s + committed * plain_cost_s(len(rows)) / len(rows),
                drafted=drafted,
                offered=self._offered,
            )
            if self._trial.rests:
                plain_cost_s.note(len(rows), seconds)
        self._prefilled_s, self._prefill_work_s, self._offered = 0.0, 0.0, False

    def note_drafting(self, token_s: float) -> None:
        """Learn how long a draft token took to come, of all rows together where drafts are made in turn."""
        if self._draft_token_s is None:
            self._draft_token_s = token_s
        self._draft_token_s += _SMOOTHING * (token_s - self._draft_token_s)

    def note_offer(self, row: TargetRow, now_s: float, *, fits: bool = True) -> None:
        """Learn from an offer: drafters are at work. One that fits may complete what the row was waiting for."""
        self._offered = True
        if not fits:
            return
        row.expects_drafts = row.drafter and row.draft_length > 0
        if row.incomplete_since_s is not None and row.has_wanted_draft():
            self._note_latency(row, now_s)

    def _note_latency(self, row: TargetRow, now_s: float) -> None:
        """One more time per draft token; a row that got none in its whole wait counts as half a token."""
        assert row.incomplete_since_s is not None
        got = max(len(row.draft()) - row.drafted_at_plan, 0.5)
        self.note_drafting((now_s - row.incomplete_since_s) / got)
        row.incomplete_since_s = None

    def _lengths(self, rows: Sequence[TargetRow], limits: list[int], *, latency_s: float) -> list[int]:
        if not self._adaptive or not rows:
            return limits
        if not self.speculates():
            return [0] * len(rows)
        rates = [row.acceptance.value for row in rows]
        return choose_draft_lengths(rates, limits, self._cost_s(rows), latency_s, alternating=self._in_turn)

    def _cost_s(self, rows: Sequence[TargetRow]) -> StepCost:
        """Of the steps of such rows: those of an ensemble last until the slowest member has answered."""
        return self._round_cost_s if any(row.ensemble is not None for row in rows) else self._step_cost_s

    def _patience_s(self, draft_length: int) -> float:
        if self._draft_token_s is None:
            return self._mean_step_s
        return min(_PATIENCE * draft_length * self._draft_token_s, self._mean_step_s)
