"""The target loop: draft, verify, commit. It waits for a draft only as long as the draft is worth.

It trusts no message: its own samples confirm or reject drafts, and a request is only tokens to continue. It knows
nothing of text, HTTP or which drafter made a draft. As the leader of an ensemble it samples from the blend of all
members; as a member it computes logits for leaders, in the same batches.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from actors.ensemble.member import MemberRow
from actors.ensemble.rounds import blend_rounds
from actors.loops.grammar_jobs import GrammarJobs
from actors.loops.mailbox import REPORT_PERIOD_S, Mailbox
from actors.loops.oom_backoff import OomBackoff
from actors.loops.options import LoopOptions
from actors.loops.row_table import PREPARING_S, choose_prefill
from actors.loops.thread import LoopTimes
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.target.beams import BeamRow
from actors.target.colocated_drafter import ColocatedDrafter
from actors.target.committer import Committer
from actors.target.inbox import TargetInbox
from actors.target.judge import Verdict, judge
from actors.target.leader import EnsembleLeader
from actors.target.planner import DraftPlanner
from actors.target.row import TargetRow
from actors.target.rows import ServedRow, TargetRows
from actors.wire.link import ConnectingLink
from actors.wire.messages import Joined, Report
from decoding.drafts.trie import Draft
from decoding.grammars.mask_threads import MaskThreads
from decoding.sampling.transfer import tensor_on

_MEMBERS_S = 0.1  # how often to look for members that take too long


class Target:
    """The loop of one target replica."""

    def __init__(self, runner: Runner, link: ConnectingLink, options: LoopOptions = LoopOptions()) -> None:
        self.times = LoopTimes()
        self._runner = runner
        self._rows = TargetRows(runner.cache, removed=self._release)
        self._mailbox = Mailbox(link, self._rows, self.times)
        drafter = None if options.colocated is None else ColocatedDrafter(options.colocated, options)
        self._colocated_drafter = drafter
        self._planner = DraftPlanner(runner, adaptive=options.adaptive, alternating=drafter is not None)
        self._leader = EnsembleLeader(link, self._mailbox.put, runner)
        structures = GrammarJobs(options.load_tokenizer, runner.vocab_size)
        self._inbox = TargetInbox(
            self._rows, self._mailbox, runner, self._planner, structures, self._leader, options.logits_mappings
        )
        self._committer = Committer(self._rows, runner, self._planner, self._inbox, self._mailbox)
        chunk = min(options.prefill_chunk, runner.max_query)
        self._backoff = OomBackoff(
            runner.cache.slots, self.times, self._inbox.fail, prefill_chunk=chunk, preempt=self._rows.preempt_youngest
        )
        self._masks = MaskThreads()
        self._waited_before_s = 0.0  # `times.waited_s` at the end of the last step

    def load(self) -> Report:
        """Return the current load; any thread may ask."""
        return self._rows.report()

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; take one step with the running rows, once they are ready."""
        self._inbox.receive(self._timeout_s())
        self._choose_mode()
        self._update_rows()
        prefilling = self._rows.prefilling
        if prefilling:
            chosen = choose_prefill(prefilling, self._backoff.prefill_chunk)
            self._backoff.prefill(partial(self._prefill, chosen), chosen)
        blendable = self._backoff.choose(self._rows.blendable)
        if blendable:
            self._backoff.step(partial(self._finish_rounds, blendable), blendable)
        running = self._rows.running
        ready = [] if _wait_s(running) > 0 else running
        candidates: list[ServedRow] = [*ready, *self._rows.requested, *self._rows.searching]
        batch = self._backoff.choose(candidates)
        if batch:
            self._backoff.step(partial(self._step, batch), batch)
        self._mailbox.close_turn()

    def _step(self, batch: list[ServedRow]) -> None:
        """Verify all drafts in one forward pass. Rows commit, members' rows reply to their leaders, beams fork."""
        round_began_s = time.perf_counter() - (self.times.waited_s - self._waited_before_s)  # with the wait for drafts
        rows = [row for row in batch if isinstance(row, TargetRow)]
        member_rows = [row for row in batch if isinstance(row, MemberRow)]
        beam_rows = [row for row in batch if isinstance(row, BeamRow)]
        self._draft(rows)
        began_s = time.perf_counter()
        drafts = self._planner.choose_drafts(rows, began_s)
        if not self._backoff.speculates:
            drafts = [draft.first(0) for draft in drafts]
        wait_for_masks = self._masks.start([row.structure for row in rows], drafts)
        self._request_logits(rows, drafts, round_began_s)
        inputs = [row.step_input(draft) for row, draft in zip(rows, drafts, strict=True)]
        inputs += [row.step_input() for row in member_rows]
        inputs += [beam_input for row in beam_rows for beam_input in row.inputs()]
        lengths = [len(row_input.tokens) for row_input in inputs]
        try:
            logits = self._runner.logits(inputs)  # [N, V]
        finally:
            masks = wait_for_masks()
        logits_per_input = logits.split(lengths)
        own = [index for index, row in enumerate(rows) if row.ensemble is None]  # others: `_finish_rounds`
        own_rows, own_drafts = [rows[index] for index in own], [drafts[index] for index in own]
        if len(own) < len(inputs):
            logits = torch.cat([logits_per_input[index] for index in own]) if own else logits[:0]
        verdicts = judge(own_rows, own_drafts, logits, [masks[index] for index in own])
        seconds = time.perf_counter() - began_s
        self._planner.note_step(sum(lengths), seconds)
        self.times.steps += 1
        self.times.step_s += seconds
        for row, mask, own_logits in zip(rows, masks, logits_per_input, strict=False):
            if row.ensemble is not None:
                row.ensemble.add_own_logits(own_logits, mask)
        self._reply(member_rows, logits_per_input[len(rows) : len(rows) + len(member_rows)])
        self._fork_beams(beam_rows, logits_per_input[len(rows) + len(member_rows) :])
        self._inbox.receive(0.0)  # before the commit, so that its drafts count
        self._commit(own_rows, own_drafts, verdicts, round_began_s)

    def _draft(self, rows: list[TargetRow]) -> None:
        """Let the colocated drafter draft, if there is one."""
        if self._colocated_drafter is None or not rows or not self._rows.drafting:
            return
        began_s = time.perf_counter()
        token_s = self._colocated_drafter.draft(rows)
        if token_s is not None:
            self._planner.note_drafting(token_s)
        self.times.drafted_s += time.perf_counter() - began_s

    def _request_logits(self, rows: list[TargetRow], drafts: list[Draft], began_s: float) -> None:
        """Begin the rounds of ensembles, so that members compute their logits while the leader does."""
        for row, draft in zip(rows, drafts, strict=True):
            if row.ensemble is not None:
                row.ensemble.begin_round(draft, time.perf_counter(), began_s)
                self._leader.request_logits(row, row.ensemble)
        if any(row.ensemble is not None for row in rows):
            self._mailbox.flush()

    def _reply(self, rows: list[MemberRow], logits_per_row: Sequence[Tensor]) -> None:
        """Send leaders the logits that they requested. logits_per_row: [n, V] each."""
        for row, logits in zip(rows, logits_per_row, strict=True):
            reply = row.reply(logits)
            if reply is not None:
                self._mailbox.put(row.key[0], reply)

    def _fork_beams(self, rows: list[BeamRow], logits_per_beam: Sequence[Tensor]) -> None:
        """Advance the beam searches. logits_per_beam: [1, V] each, row after row."""
        start = 0
        for row in rows:
            end = start + len(row.search.live)
            self._committer.fork_beams(row, torch.cat(list(logits_per_beam[start:end])))
            start = end

    def _finish_rounds(self, rows: list[TargetRow]) -> None:
        """Judge drafts by the blend, for ensembles that have the logits of all members."""
        ensembles = [row.ensemble for row in rows if row.ensemble is not None]
        rounds = [ensemble.round for ensemble in ensembles if ensemble.round is not None]
        drafts = [round_.draft for round_ in rounds]
        verdicts = judge(rows, drafts, blend_rounds(ensembles), [round_.mask for round_ in rounds])
        for ensemble, draft, verdict in zip(ensembles, drafts, verdicts, strict=True):
            ensemble.end_round(verdict.logits_rows(), verdict.tokens(draft))
        tokens = sum(len(draft.tokens) + 1 for draft in drafts)
        requested_at_s = min(round_.requested_at_s for round_ in rounds)
        self._planner.note_ensemble_round(tokens, time.perf_counter() - requested_at_s)
        self._commit(rows, drafts, verdicts, min(round_.began_s for round_ in rounds))
        self._mailbox.flush()

    def _commit(self, rows: list[TargetRow], drafts: list[Draft], verdicts: list[Verdict], began_s: float) -> None:
        """Commit a step, and plan the next. began_s: when the step began, or the wait for drafts before it."""
        if not rows:
            return
        committed = self._committer.commit_step(rows, drafts, verdicts)
        drafted = any(draft.tokens for draft in drafts)
        self._planner.note_round(rows, committed, time.perf_counter() - began_s, drafted=drafted)
        self._waited_before_s = self.times.waited_s
        self._plan(rows)

    def _prefill(self, rows: list[ServedRow]) -> None:
        """Compute one chunk of each row's pending tokens. At the end of its prompt a row commits a token, or forks."""
        began_s = time.perf_counter()
        chunks = [row.next_input(self._backoff.prefill_chunk) for row in rows]
        logits = self._last_logits(rows, chunks)  # [B, V]
        read = [index for index, row in enumerate(rows) if chunks[index].end == len(row.tokens)]
        new_rows = {index: row for index in read if isinstance(row := rows[index], TargetRow)}
        verdicts = self._judge_first(new_rows, logits)
        for index in read:
            if isinstance(row := rows[index], BeamRow):
                self._committer.fork_beams(row, logits[index : index + 1])
        for row, chunk in zip(rows, chunks, strict=True):
            row.cached = chunk.end
        seconds = time.perf_counter() - began_s
        self.times.prefill_s += seconds
        self._planner.note_prefill(sum(len(chunk.tokens) for chunk in chunks), seconds)
        self._inbox.receive(0.0)
        self._committer.commit_first(list(new_rows.values()), verdicts)
        if read:
            self._mailbox.flush()  # first tokens do not wait for the step that follows
        self._plan([row for row in rows if isinstance(row, TargetRow) and not row.prefilling])

    def _judge_first(self, rows: Mapping[int, TargetRow], logits: Tensor) -> list[Verdict]:
        """Choose the rows' first tokens. rows: by index in logits, [B, V]."""
        if not rows:
            return []
        no_drafts = [Draft([], []) for _ in rows]
        wait_for_masks = self._masks.start([row.structure for row in rows.values()], no_drafts)
        chosen_logits = logits[tensor_on(logits.device, list(rows), torch.int64)]
        return judge(list(rows.values()), no_drafts, chosen_logits, wait_for_masks())

    def _last_logits(self, rows: list[ServedRow], chunks: list[RowInput]) -> Tensor:
        """Return the logits after each chunk, [B, V]. Rows that want the prompt's log-probabilities note them."""
        if not any(row.wants_prompt_logprobs for row in rows):
            return self._runner.logits(chunks, last_only=True)
        logits_per_row = self._runner.logits(chunks).split([len(chunk.tokens) for chunk in chunks])
        for row, chunk, logits in zip(rows, chunks, logits_per_row, strict=True):
            if isinstance(row, TargetRow) and row.wants_prompt_logprobs:
                row.note_prompt(chunk, logits)
        return torch.stack([logits[-1] for logits in logits_per_row])

    def _choose_mode(self) -> None:
        """Choose between speculative and plain decoding for the rows that are here."""
        if not len(self._rows):
            return
        self._planner.active_rows = len(self._rows)
        self._rows.drafting = self._planner.speculates() and self._backoff.speculates
        trial = self._planner.trial
        self._rows.in_trial, self._rows.speculation_gain = trial.is_trying, trial.gain
        self.times.trial_loss_s = trial.lost_s

    def _update_rows(self) -> None:
        """Begin what is ready, fail what can't go on, and tell leaders which members' rows are ready."""
        for row, error in self._rows.make_ready():
            self._inbox.fail(row, error)
        for row, reason in self._leader.drop_late_members(time.perf_counter()):
            self._inbox.fail(row, reason)
        for member_row in self._rows.joining:
            member_row.joined = True
            self._mailbox.put(member_row.key[0], Joined(member_row.key[1], member_row.admission))

    def _plan(self, committed: list[TargetRow]) -> None:
        """Decide which drafts the rows that just committed wait for."""
        self._planner.plan(self._rows.running, {row.key for row in committed}, time.perf_counter())

    def _timeout_s(self) -> float:
        """Return how long to wait for messages; 0 while there is something to compute."""
        if not len(self._rows):
            return REPORT_PERIOD_S
        if self._rows.prefilling or self._rows.requested or self._rows.searching or self._rows.blendable:
            return 0.0
        running = self._rows.running
        if running:
            return _wait_s(running)
        return PREPARING_S if any(not row.ready for row in self._rows) else _MEMBERS_S

    def _release(self, row: ServedRow) -> None:
        """Let members and the colocated drafter forget a row that is removed."""
        if isinstance(row, TargetRow) and row.ensemble is not None:
            self._leader.remove(row)
        if isinstance(row, TargetRow) and self._colocated_drafter is not None:
            self._colocated_drafter.remove(row)


def _wait_s(rows: list[TargetRow]) -> float:
    """Return how much longer the rows wait for drafts, in seconds; 0 to take the step."""
    now_s = time.perf_counter()
    return max((row.wait_s(now_s) for row in rows), default=0.0)
