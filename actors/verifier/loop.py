"""The target loop: draft, verify, commit. It waits for a draft only as long as the draft is worth.

It trusts no message: its own samples confirm or reject drafts. As the leader of an ensemble it samples from the blend
of all members; as a member it computes logits for leaders, in the same batches.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise

import torch
from msgspec.structs import replace
from torch import Tensor

from actors.ensemble.rounds import blend_rounds
from actors.loops.adapters import AdapterTable
from actors.loops.mailbox import REPORT_PERIOD_S, Mailbox
from actors.loops.options import LoopOptions
from actors.loops.row import GrammarJobs, ServedRow
from actors.loops.row_table import PREPARING_S
from actors.loops.scheduler import Scheduler, Share
from actors.loops.thread import LoopTimes
from actors.loops.weights import WeightsSwitch
from actors.verifier.colocated_drafter import ColocatedDrafter
from actors.verifier.heads_drafter import HeadsDrafter
from actors.verifier.inbox import TargetInbox
from actors.verifier.judge import Committer, judge
from actors.verifier.leader import EnsembleLeader
from actors.verifier.policy import SpeculationPolicy
from actors.verifier.practice import Practice
from actors.verifier.proposers import AttachedDrafters, Proposer, TextLookup
from actors.verifier.rows import TargetRow, TargetRows, Verification
from actors.wire.link import Link
from actors.wire.messages import Report, WeightsState
from decoding.drafts.corpus import Corpus
from decoding.drafts.verification import Verdict
from decoding.grammars.structure import MaskThread
from decoding.kernels.matches import can_index
from decoding.sampling.penalties import TextTables
from engine.model.cuda import StepTimer
from engine.model.ragged_batch import RowInput, with_adapter
from engine.model.runner import Runner

Shares = Sequence[Share[ServedRow]]

_MEMBERS_S = 0.1  # how often to look for members that take too long


class Target:
    """The loop of one target replica."""

    def __init__(self, runner: Runner, link: Link, options: LoopOptions = LoopOptions()) -> None:
        self.times = LoopTimes()
        self._runner = runner
        self._rows = TargetRows(runner.cache, removed=self._release)
        self._mailbox = Mailbox(link, self._rows, self.times)
        self._drafters = AttachedDrafters(self._rows, self._mailbox)
        self._lookup = TextLookup(self._rows, _corpus(options, runner))
        self._colocated_drafter = (
            None if options.colocated is None else ColocatedDrafter(options.colocated, runner.has_tokens, options)
        )
        self._heads = None if options.heads is None else HeadsDrafter(options.heads, runner, self._rows)
        possible = self._drafters, self._lookup, self._colocated_drafter, self._heads
        self._proposers: list[Proposer] = [each for each in possible if each is not None]
        alternating = self._colocated_drafter is not None
        self._policy = SpeculationPolicy(runner, self._proposers, adaptive=options.adaptive, alternating=alternating)
        self._practice = Practice(runner, self._policy.take_cost)
        self._rows.drafting = self._policy.speculates()
        self._leader = EnsembleLeader(link, self._mailbox.put, runner)
        structures = GrammarJobs(options.load_tokenizer, runner.vocab_size)
        self._adapters: AdapterTable[ServedRow] = AdapterTable(
            runner.lora, heads=None if options.heads is None else options.heads.lora
        )
        self._weights = WeightsSwitch(self._rows, options.weights, self._mailbox.report_soon, at_once=False)
        self._inbox = TargetInbox(
            *(self._rows, self._mailbox, runner, self._policy, self._drafters, self._lookup),
            *(structures, self._adapters, self._leader, options.logits_mappings, self._weights.want),
        )
        self._committer = Committer(self._rows, runner, self._policy, self._inbox, self._mailbox)
        chunk = min(options.prefill_chunk, runner.max_query)
        self._scheduler = Scheduler(self._rows, self.times, self._inbox.fail, prefill_chunk=chunk)
        self._masks = MaskThread()
        self._texts = TextTables()
        self._counted_until_s = 0.0  # the end of the last verified step, or of the wait for rows

    @property
    def weights(self) -> WeightsState:
        return self._rows.weights

    def load(self) -> Report:
        """Return the current load; any thread may ask."""
        corpus, times = self._lookup.corpus, self.times
        spent_s = defaultdict[str, float](float, {self._drafters.name: times.waited_s})
        for proposer in self._proposers:  # a colocated drafter has the same name as others
            spent_s[proposer.name] += proposer.spent_s
        busy_s = times.step_s + times.prefill_s + times.drafted_s + times.waited_s
        shares = {name: seconds / busy_s for name, seconds in spent_s.items() if seconds}
        report = replace(self._rows.report(), proposer_shares=shares)
        return (
            report if corpus is None else replace(report, corpus_tokens=corpus.tokens, corpus_bytes=corpus.size_bytes)
        )

    def turn(self) -> None:
        """Receive, schedule, run, take, flush: one forward over whatever the rows have to run."""
        self._receive()
        self._update_rows()
        self._scheduler.run(self._finish_rounds, self._scheduler.schedule(self._rows.blendable))
        self._scheduler.run(self._step, self._scheduler.schedule(self._due_rows(self._wait_s())))
        self._mailbox.close_turn()
        self._read_beside()
        self._counted_until_s += self._practice.turn(busy=bool(len(self._rows)))

    def _receive(self) -> None:
        """Receive, and wait if there is nothing to compute. That counts as time of a step if rows are being decoded."""
        were_running = bool(self._rows.running)
        self._inbox.receive(self._timeout_s())
        if not were_running:
            self._counted_until_s = time.perf_counter()

    def _step(self, shares: Shares) -> None:
        """Draft, verify, commit. Chunks of prompts, members' drafts and beams are in the same forward."""
        samplers, running = self._rows.sampling(shares), self._rows.verifying(shares)
        self._draft(running, others=sum([share.tokens for share in shares]) - sum([row.step_tokens for row in running]))
        self._request_logits(running)
        inputs = [row.inputs(limit) for row, limit, _ in shares]
        if self._runner.lora is not None:
            slots = [share.row.adapter_slot or 0 for share in shares]
            inputs = [with_adapter(runs, slot) for runs, slot in zip(inputs, slots, strict=True)]
        timer = StepTimer(self._runner.device)
        logits = self._forward(inputs, samplers)  # [N, V]
        if self._heads is not None:
            writers = [self._rows.writer(share.row.key) for share in shares] if self._rows.drafting else []
            self._heads.note_step(writers, inputs)
        verifications, logits = self._take(shares, inputs, logits)
        wait_for_verdicts = judge(verifications, logits, self._texts)
        timer.stop()
        self._inbox.receive(0.0)  # while the device computes: a late draft still tells what follows the verdict
        verdicts = wait_for_verdicts()
        tokens = [sum([len(run.tokens) for run in runs]) for runs in inputs]  # a chunk may have run fewer than granted
        prompt_tokens = sum([count for count, share in zip(tokens, shares, strict=True) if share.is_chunk])
        self._note_times(sum(tokens), prompt_tokens, timer.seconds(), alone=not running)
        began_s = self._counted_until_s if running else None
        self._commit(verifications, verdicts, began_s, prompt_tokens=prompt_tokens)

    def _draft(self, rows: list[TargetRow], *, others: int) -> None:
        """Give each row the draft that its step verifies. others: tokens of other rows in the same forward."""
        if not rows:
            return
        began_s = time.perf_counter()
        self._policy.draft(rows, wanted=self._rows.drafting)
        now_s = time.perf_counter()
        self.times.drafted_s += now_s - began_s
        drafts = self._policy.choose_drafts(rows, now_s, others=others, drafting_s=now_s - began_s)
        for row, draft in zip(rows, drafts, strict=True):
            row.step_draft = draft if self._scheduler.speculates else draft.first(0)

    def _read_beside(self) -> None:
        """Let a colocated drafter read a chunk of the prompts, too. What the target chose has been sent before."""
        drafter = self._reader
        if drafter is None:
            return
        began_s = time.perf_counter()
        if drafter.read(self._rows.writers):
            seconds = time.perf_counter() - began_s
            self.times.drafted_s += seconds
            drafter.spent_s += seconds
            self._counted_until_s += seconds
            self._policy.note_reading(seconds)

    @property
    def _reader(self) -> ColocatedDrafter | None:
        drafter = self._colocated_drafter
        rests = drafter is None or not self._rows.drafting or drafter.name in self._policy.resting
        return None if rests else drafter

    def _request_logits(self, rows: list[TargetRow]) -> None:
        ensembles = [(row, row.ensemble) for row in rows if row.ensemble is not None]
        for row, ensemble in ensembles:
            ensemble.begin_round(row.step_draft, time.perf_counter(), self._counted_until_s)
            self._leader.request_logits(row, ensemble)
        if ensembles:
            self._mailbox.flush()

    def _forward(self, inputs: Sequence[Sequence[RowInput]], samplers: list[TargetRow]) -> Tensor:
        """Return the logits that the inputs want, [N, V]. The masks of structured answers are computed meanwhile."""
        wait_for_masks = self._masks.start([row.structure for row in samplers], [row.step_draft for row in samplers])
        runs = list(chain.from_iterable(inputs))
        try:
            return self._runner.logits(runs)
        finally:
            for row, mask in zip(samplers, wait_for_masks(), strict=True):
                row.mask = mask

    def _take(
        self, shares: Shares, inputs: Sequence[Sequence[RowInput]], logits: Tensor
    ) -> tuple[list[Verification], Tensor]:
        """Let rows take their part of the logits, [N, V], and answer. Returns what is left to verify, and by which."""
        ends = accumulate([sum([run.logits_count for run in runs]) for runs in inputs])
        firsts = accumulate([sum([len(run.tokens) for run in runs]) for runs in inputs], initial=0)
        for (row, *_), first, (start, end) in zip(shares, firsts, pairwise(chain([0], ends)), strict=False):
            message = row.take(logits, range(start, end))
            self._exit_early(row, first)
            if message is not None:
                self._mailbox.put(row.key[0], message)
                if row.done:
                    self._rows.remove(row.key)
        verifications = self._rows.verifications(shares)
        leading = [v for v in verifications if v.row.ensemble is not None]
        if not leading:
            return verifications, logits
        alone = [v for v in verifications if v.row.ensemble is None]
        blended = blend_rounds([v.row.ensemble for v in leading if v.row.ensemble is not None])
        logits = torch.cat([logits, blended]) if alone else blended
        return [*alone, *_numbered(leading, len(logits) - len(blended))], logits

    def _exit_early(self, row: ServedRow, first: int) -> None:
        """Add what earlier layers predict to the row's round. first: of its tokens, in the forward."""
        writer, hidden, early_exit = self._rows.writer(row.key), self._runner.hidden, self._runner.early_exit
        ensemble = None if writer is None else writer.ensemble
        if ensemble is None or not ensemble.early or ensemble.round is None or hidden is None or early_exit is None:
            return
        count = len(ensemble.round.draft.tokens) + 1
        ensemble.add_early_logits(early_exit, hidden.layers[first : first + count])

    def _finish_rounds(self, shares: Shares) -> None:
        rows = self._rows.sampling(shares)
        ensembles = [row.ensemble for row in rows if row.ensemble is not None]
        rounds = [ensemble.round for ensemble in ensembles if ensemble.round is not None]
        blended = blend_rounds(ensembles)
        answered = [
            Verification(row, round_.draft, range(len(round_.draft.tokens) + 1), round_.mask)
            for row, round_ in zip(rows, rounds, strict=True)
        ]
        verifications = _numbered(answered, 0)
        verdicts = judge(verifications, blended, self._texts)()
        requested_at_s = min(round_.requested_at_s for round_ in rounds)
        self._policy.note_ensemble_round(len(blended), time.perf_counter() - requested_at_s)
        self._commit(verifications, verdicts, min(round_.began_s for round_ in rounds))
        self._mailbox.flush()

    def _commit(
        self,
        verifications: list[Verification],
        verdicts: list[Verdict],
        began_s: float | None,
        *,
        prompt_tokens: int = 0,
    ) -> None:
        """Commit a step, and plan the next.

        began_s: when the round began, with the messages and the wait for drafts before it; None: nothing was verified.
        """
        verdicts = [_end_round(*pair) for pair in zip(verifications, verdicts, strict=True)]
        committed = self._committer.commit(verifications, verdicts)
        self._policy.learn(verifications, verdicts)
        if not verifications:
            return
        rows = [row for row, *_ in verifications]
        if began_s is not None:
            drafted = any(draft.tokens for _, draft, *_ in verifications)
            self._counted_until_s = time.perf_counter()
            seconds = self._counted_until_s - began_s
            self._policy.note_round(rows, committed, seconds, drafted=drafted, prompt_tokens=prompt_tokens)
        self._policy.plan(self._rows.running, {row.key for row in rows}, time.perf_counter())

    def _note_times(self, tokens: int, prompt_tokens: int, seconds: float, *, alone: bool) -> None:
        """Count a forward over so many tokens. alone: no row verified a draft, so it is no part of the next round."""
        prompt_s = seconds * prompt_tokens / tokens
        self.times.prefill_s += prompt_s
        self.times.step_s += seconds - prompt_s
        self.times.steps += tokens > prompt_tokens
        if not prompt_tokens:
            self._policy.note_step(tokens, seconds)
        elif alone:
            self._policy.note_prefill(tokens, seconds)
        if alone:
            self._counted_until_s += seconds

    def _choose_mode(self) -> None:
        """Choose between speculative and plain decoding for the texts that are written here."""
        active = sum([row.slot >= 0 for row in self._rows.writers])
        if not active:
            return
        self._policy.active_rows = active
        drafting = self._policy.speculates() and self._scheduler.speculates
        if drafting != self._rows.drafting:
            self._rows.drafting = drafting
            self._update_drafters()
        trial = self._policy.trial
        self._rows.in_trial, self._rows.speculation_gain = trial.is_trying, trial.gain
        self.times.trial_loss_s = trial.lost_s

    def _update_drafters(self) -> None:
        """Let drafters rest or begin at once: one that goes on for a step may slow the target's."""
        self._policy.plan(self._rows.running, set(), time.perf_counter())
        for row in self._rows.writers:
            if row.verifies:
                self._drafters.propose([row])
            else:
                self._drafters.rest(row)
        self._mailbox.flush()

    def _update_rows(self) -> None:
        """Begin what is ready, fail what can't go on, invite members, announce what has read its text."""
        self._choose_mode()
        self._weights.turn()
        for row, error in [*self._rows.make_ready(), *self._adapters.make_ready()]:
            self._inbox.fail(row, error)
        self._lookup.read()
        self._leader.follow_slots(time.perf_counter())
        for row, reason in self._leader.drop_late_members(time.perf_counter()):
            self._inbox.fail(row, reason)
        for reader in self._rows.readers:
            message = reader.announce()
            if message is not None:
                self._mailbox.put(reader.key[0], message)
        self._mailbox.flush()

    def _due_rows(self, wait_s: float) -> Iterator[ServedRow]:
        """Yield the rows of the next forward. Those that verify begin together, once none waits for its draft."""
        texts = (text for row in self._rows for text in row.texts)
        return (text for text in texts if text.due and not (wait_s > 0 and text.verifies))

    def _wait_s(self) -> float:
        """Return how much longer rows wait for drafts, in seconds; 0 to take the step."""
        now_s = time.perf_counter()
        return max([row.wait_s(now_s) for row in self._rows], default=0.0)

    def _timeout_s(self) -> float:
        """Return how long to wait for messages; 0 while there is something to compute."""
        if self._weights.is_due:
            return 0.0
        if not len(self._rows):
            is_idle = self._practice.is_over and not self._rows.is_preparing
            return REPORT_PERIOD_S if is_idle else PREPARING_S
        if self._rows.blendable or (self._reader is not None and self._reader.reading):
            return 0.0
        wait_s = self._wait_s()
        if next(self._due_rows(wait_s), None) is not None:
            return 0.0
        if wait_s > 0:
            return wait_s
        return PREPARING_S if self._rows.is_preparing else _MEMBERS_S

    def _release(self, row: ServedRow) -> None:
        """Let members, adapters and drafters forget a row that is removed. The last one leaves no table of texts."""
        self._leader.remove(row)
        for text in row.texts:
            self._adapters.release(text)
        for proposer in self._proposers:
            proposer.remove(row)
        if not len(self._rows):
            self._texts.clear()


def _numbered(verifications: Sequence[Verification], start: int) -> list[Verification]:
    """Return these with the logits from row `start` on, one after the other."""
    ends = accumulate([len(verification.rows) for verification in verifications], initial=start)
    return [v._replace(rows=range(*pair)) for v, pair in zip(verifications, pairwise(ends), strict=True)]


def _end_round(verification: Verification, verdict: Verdict) -> Verdict:
    """End the round of a row that leads an ensemble. Returns the verdict, whose error names members to blame."""
    row, draft, *_ = verification
    ensemble = row.ensemble
    if ensemble is None or ensemble.round is None:  # the row may have been removed while the device computed
        return verdict
    if verdict.error is not None:
        return verdict._replace(error=ensemble.explained(verdict.error))
    kept, _ = row.cut(verdict.tokens(draft))
    ensemble.end_round(verdict.logits_rows()[: len(kept)], kept)
    return verdict


def _corpus(options: LoopOptions, runner: Runner) -> Corpus | None:
    return None if options.corpus is None or not can_index() else Corpus(options.corpus, runner.has_tokens)
