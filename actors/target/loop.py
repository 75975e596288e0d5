"""The target loop: draft, verify, commit. It never waits for a draft longer than the draft is worth.

It trusts no message: drafts are hints that its own samples confirm or not, and a request is just tokens to continue.
It knows nothing of text, HTTP or which drafter made a draft. As the leader of an ensemble it samples from the members'
blend in place of its own distribution; as a member it answers what a leader asks, in the same batches.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from msgspec.structs import replace
from torch import Tensor

from actors.ensemble.member import MemberRow
from actors.ensemble.rounds import blended
from actors.loops.grammar_jobs import GrammarJobs, LoadTokenizer
from actors.loops.mailbox import REPORT_PERIOD_S, Mailbox
from actors.loops.oom_backoff import OomBackoff
from actors.loops.row_table import PREPARING_S, choose_prefill
from actors.loops.thread import LoopTimes
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.target.beams import BeamRow
from actors.target.colocated_drafter import ColocatedDrafter
from actors.target.inbox import TargetInbox
from actors.target.judge import Verdict, judge
from actors.target.leader import EnsembleLeader
from actors.target.planner import DraftPlanner
from actors.target.row import TargetRow
from actors.target.rows import ServedRow, TargetRows
from actors.tokenizers.logits_mapping import LogitsMapping
from actors.wire.link import ConnectingLink
from actors.wire.messages import Commit, Joined, Report
from decoding.drafts.trie import Draft
from decoding.grammars.mask_threads import MaskThreads
from decoding.sampling.stopping import cut_at_stop
from decoding.sampling.transfer import tensor_on

_MEMBERS_S = 0.1  # how often to look for members that take too long


class Target:
    """One replica of a target model."""

    def __init__(
        self,
        runner: Runner,
        link: ConnectingLink,
        *,
        prefill_chunk: int = 256,
        adaptive: bool = True,
        load_tokenizer: LoadTokenizer | None = None,
        inside: ColocatedDrafter | None = None,
        logits_mappings: Mapping[str, LogitsMapping] | None = None,
    ) -> None:
        """
        prefill_chunk: prompt tokens processed between two steps of the running rows.
        adaptive: verify as many draft tokens as pay; otherwise always as many as the request allows.
        load_tokenizer: for structured answers.
        inside: drafts here, by turns, for the requests that a drafter is to work on.
        logits_mappings: of a member, by the names of its leaders that have another tokenizer.
        """
        self.times = LoopTimes()
        self._runner = runner
        self._rows = TargetRows(runner.cache, removed=self._leave)
        self._mailbox = Mailbox(link, self._rows, self.times)
        self._inside = inside
        self._planner = DraftPlanner(runner, adaptive=adaptive, alternating=inside is not None)
        self._ensembles = EnsembleLeader(link, self._mailbox.put, runner)
        structures = GrammarJobs(load_tokenizer, runner.vocab_size)
        self._inbox = TargetInbox(
            self._rows, self._mailbox, runner, self._planner, structures, self._ensembles, logits_mappings or {}
        )
        chunk = min(prefill_chunk, runner.max_query)
        self._backoff = OomBackoff(runner.cache.slots, self.times, self._inbox.fail, prefill_chunk=chunk)
        self._masks = MaskThreads()
        self._waited_before_s = 0.0  # for drafts, up to the step before

    def load(self) -> Report:
        """The load at this moment; any thread may ask."""
        return self._rows.report()

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; take one step with the running ones, once they are ready."""
        self._inbox.receive(self._timeout_s())
        if len(self._rows):
            self._planner.rows_in_hand = len(self._rows)
            self._rows.drafting = self._planner.speculates() and self._backoff.speculates
            trial = self._planner.trial
            self._rows.trying, self._rows.speculation_gain = trial.is_trying, trial.gain
            self.times.trial_loss_s = trial.lost_s
        self._look_after_rows()
        prefilling = self._rows.prefilling
        if prefilling:
            chosen = choose_prefill(prefilling, self._backoff.prefill_chunk)
            self._backoff.prefill(partial(self._prefill, chosen), chosen)
        complete = self._backoff.choose(self._rows.complete)
        if complete:
            self._backoff.step(partial(self._judge_rounds, complete), complete)
        running = self._rows.running
        ready = [] if _wait_s(running) > 0 else running
        candidates: list[ServedRow] = [*ready, *self._rows.asked, *self._rows.searching]
        rows = self._backoff.choose(candidates)
        if rows:
            self._backoff.step(partial(self._step, rows), rows)
        self._mailbox.close_turn()

    def _step(self, batch: list[ServedRow]) -> None:
        """One batched forward over every row's last token and its draft; each row commits one token or more.

        But those that lead an ensemble commit when its members have answered, those asked by a leader answer, and beams
        fork.
        """
        turn_began_s = time.perf_counter() - (self.times.waited_s - self._waited_before_s)  # the wait for drafts, too
        rows = [row for row in batch if isinstance(row, TargetRow)]
        asked = [row for row in batch if isinstance(row, MemberRow)]
        searching = [row for row in batch if isinstance(row, BeamRow)]
        if self._inside is not None and rows and self._rows.drafting:
            self._draft(self._inside, rows)
        began_s = time.perf_counter()
        drafts = self._planner.choose(rows, began_s)
        if not self._backoff.speculates:
            drafts = [draft.first(0) for draft in drafts]
        masks = self._masks.start([row.structure for row in rows], drafts)
        self._ask(rows, drafts, turn_began_s)
        runs = [row.step_input(draft) for row, draft in zip(rows, drafts, strict=True)]
        runs += [row.step_input() for row in asked]
        runs += [run for row in searching for run in row.inputs()]
        try:
            logits = self._runner.logits(runs)  # [N, V]
        finally:
            allowed = masks()
        parts = logits.split([len(run.tokens) for run in runs])
        alone = [at for at, row in enumerate(rows) if row.ensemble is None]
        if len(alone) < len(runs):
            logits = torch.cat([parts[at] for at in alone]) if alone else logits[:0]
        chosen = [rows[at] for at in alone], [drafts[at] for at in alone]
        verdicts = judge(*chosen, logits, [allowed[at] for at in alone])
        now_s = time.perf_counter()
        self._planner.note_step(sum(len(run.tokens) for run in runs), now_s - began_s)
        self.times.steps += 1
        self.times.step_s += now_s - began_s
        self._answer(asked, parts[len(rows) : len(rows) + len(asked)])
        self._search(searching, parts[len(rows) + len(asked) :])
        for row, mask, part in zip(rows, allowed, parts, strict=False):
            if row.ensemble is not None:
                row.ensemble.take_own(part, mask)
        self._inbox.receive(0.0)  # what was offered meanwhile is there for the verdict
        self._follow(*chosen, verdicts, turn_began_s)

    def _draft(self, inside: ColocatedDrafter, rows: list[TargetRow]) -> None:
        """The drafter's turn."""
        began_s = time.perf_counter()
        token_s = inside.draft(rows)
        if token_s is not None:
            self._planner.note_drafting(token_s)
        self.times.drafted_s += time.perf_counter() - began_s

    def _judge_rounds(self, rows: list[TargetRow]) -> None:
        """Follow the blends of ensembles whose members have all answered."""
        ensembles = [row.ensemble for row in rows if row.ensemble is not None]
        rounds = [ensemble.round for ensemble in ensembles if ensemble.round is not None]
        drafts = [one.draft for one in rounds]
        verdicts = judge(rows, drafts, blended(ensembles), [one.mask for one in rounds])
        for ensemble, draft, verdict in zip(ensembles, drafts, verdicts, strict=True):
            ensemble.close(verdict.places(), verdict.tokens(draft))
        tokens = sum(len(draft.tokens) + 1 for draft in drafts)
        self._planner.note_answers(tokens, time.perf_counter() - min(one.asked_at_s for one in rounds))
        self._follow(rows, drafts, verdicts, min(one.began_s for one in rounds))
        self._mailbox.flush()

    def _follow(self, rows: list[TargetRow], drafts: list[Draft], verdicts: list[Verdict], began_s: float) -> None:
        """Commit what the target chose: of each row's draft, then the first token of its own.

        began_s: when the step began, or the wait for drafts before it.
        """
        if not rows:
            return
        committed = 0
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            if self._rows.get(row.key) is row and not self._breaks_structure(row, verdict):
                path = verdict.path
                self._planner.note_verdict(row, drafted=len(path) + verdict.rejected, accepted=len(path))
                self._runner.compact(row.slot, row.cached + 1, [row.cached + 1 + place for place in path])
                self._commit(row, draft, verdict)
                committed += len(path) + 1
        drafted = any(draft.tokens for draft in drafts)
        self._planner.note_round(rows, committed, time.perf_counter() - began_s, drafted=drafted)
        self._waited_before_s = self.times.waited_s
        self._plan(rows)

    def _breaks_structure(self, row: TargetRow, verdict: Verdict) -> bool:
        """Whether the row had to fail, because nothing could follow its text."""
        error = row.structure and row.structure.error_after(verdict.path[-1] if verdict.path else -1)
        if error:
            self._inbox.fail(row, error)
        return bool(error)

    def _prefill(self, rows: list[ServedRow]) -> None:
        """One chunk of each row's pending tokens; a row whose last chunk this was commits its first token, or forks."""
        began_s = time.perf_counter()
        chunks = [row.next_input(self._backoff.prefill_chunk) for row in rows]
        logits = self._last_logits(rows, chunks)  # [B, V]
        last = [at for at, row in enumerate(rows) if chunks[at].end == len(row.tokens)]
        done = [(at, row) for at in last if isinstance(row := rows[at], TargetRow)]
        verdicts: list[Verdict] = []
        none = [Draft([], []) for _ in done]
        if done:
            masks = self._masks.start([row.structure for _, row in done], none)
            verdicts = judge(
                [row for _, row in done],
                none,
                logits[tensor_on(logits.device, [at for at, _ in done], torch.int64)],
                masks(),
            )
        for at in last:
            if isinstance(row := rows[at], BeamRow):
                self._fork(row, logits[at : at + 1])
        for row, chunk in zip(rows, chunks, strict=True):
            row.cached = chunk.end
        spent_s = time.perf_counter() - began_s
        self.times.prefill_s += spent_s
        self._planner.note_prefill(sum(len(chunk.tokens) for chunk in chunks), spent_s)
        self._inbox.receive(0.0)
        for (_, row), draft, verdict in zip(done, none, verdicts, strict=True):
            row.cached -= 1  # as in a step, where the cache lacks the last token: _commit counts it
            if self._rows.get(row.key) is row and not self._breaks_structure(row, verdict):
                self._commit(row, draft, verdict)
        if last:
            self._mailbox.flush()  # the first token is not to wait for the step that follows
        self._plan([row for row in rows if isinstance(row, TargetRow) and not row.prefilling])

    def _last_logits(self, rows: list[ServedRow], chunks: list[RowInput]) -> Tensor:
        """The logits after each chunk, [B, V]; of rows that want the prompt's log-probabilities, those on the way."""
        if not any(row.wants_prompt_logprobs for row in rows):
            return self._runner.logits(chunks, last_only=True)
        parts = self._runner.logits(chunks).split([len(chunk.tokens) for chunk in chunks])
        for row, chunk, logits in zip(rows, chunks, parts, strict=True):
            if isinstance(row, TargetRow) and row.wants_prompt_logprobs:
                row.note_prompt(chunk, logits)
        return torch.stack([logits[-1] for logits in parts])

    def _commit(self, row: TargetRow, draft: Draft, verdict: Verdict) -> None:
        """Append a step's accepted tokens and the target's own last one, and tell the coordinator."""
        peer, request_id = row.key
        tokens = verdict.tokens(draft)
        ends, most = row.history.end_token_ids, row.params.max_tokens
        kept, finish = cut_at_stop(tokens, row.generated, end_token_ids=ends, max_tokens=most)
        commit = Commit(
            request_id=request_id,
            base=len(row.tokens),
            tokens=kept,
            drafted=len(draft.tokens),
            accepted=min(len(verdict.path), len(kept)),
            finish=finish,
            logprobs=verdict.logprobs and verdict.logprobs[: len(kept)],
            prompt_logprobs=row.prompt_logprobs if row.generated == 0 and row.wants_prompt_logprobs else None,
            members=row.ensemble.shares() if row.ensemble else None,
            admission=row.admission,
            views=row.ensemble.views and row.ensemble.views[: len(kept)] if row.ensemble else None,
        )
        row.cached += len(tokens)
        row.commit(kept, rejected=verdict.rejected)
        if finish is None and verdict.rejected:
            commit = replace(commit, rejected=True, hit=bool(row.trie))
        if finish is None:
            self._inbox.update_drafter(row)  # first: it is waited for
        self._mailbox.put(peer, commit)
        if finish is not None:
            self._rows.remove(row.key)
        elif self._rows.drafting:
            row.propose()

    def _ask(self, rows: list[TargetRow], drafts: list[Draft], began_s: float) -> None:
        """Let the members of ensembles begin with what the leader begins with."""
        leading = [(row, row.ensemble, draft) for row, draft in zip(rows, drafts, strict=True) if row.ensemble]
        for row, ensemble, draft in leading:
            ensemble.begin(draft, time.perf_counter(), began_s)
            self._ensembles.ask(row, ensemble)
        if leading:
            self._mailbox.flush()

    def _answer(self, asked: list[MemberRow], parts: tuple[Tensor, ...]) -> None:
        """Tell leaders what they asked. parts: [n, V] of each row's tokens."""
        for row, logits in zip(asked, parts, strict=True):
            answer = row.answer(logits)
            if answer is not None:
                self._mailbox.put(row.key[0], answer)

    def _search(self, rows: list[BeamRow], parts: Sequence[Tensor]) -> None:
        """Follow the beams of all rows. parts: [1, V] of each beam."""
        start = 0
        for row in rows:
            end = start + len(row.search.live)
            self._fork(row, torch.cat(list(parts[start:end])))
            start = end

    def _fork(self, row: BeamRow, logits: Tensor) -> None:
        """Let a row's beams fork, and tell what they found once none goes on. logits: as `BeamRow.take` has it."""
        if not row.take(logits):
            return
        found = row.found()
        if row.error is not None and not found.answers:
            self._inbox.fail(row, row.error)
        else:
            self._mailbox.put(row.key[0], found)
            self._rows.remove(row.key)

    def _look_after_rows(self) -> None:
        """Begin what can begin, end what can't go on."""
        for row, error in self._rows.make_ready():
            self._inbox.fail(row, error)
        for leading, reason in self._ensembles.give_up_late(time.perf_counter()):
            self._inbox.fail(leading, reason)
        for member in self._rows.joining:
            member.joined = True
            self._mailbox.put(member.key[0], Joined(member.key[1], member.admission))

    def _plan(self, committed: list[TargetRow]) -> None:
        """Decide what the rows that just committed wait for."""
        self._planner.plan(self._rows.running, {row.key for row in committed}, time.perf_counter())

    def _timeout_s(self) -> float:
        """How long to wait for messages: not at all while there is something to compute."""
        if not len(self._rows):
            return REPORT_PERIOD_S
        if self._rows.prefilling or self._rows.asked or self._rows.searching or self._rows.complete:
            return 0.0
        running = self._rows.running
        if running:
            return _wait_s(running)
        return PREPARING_S if any(not row.ready for row in self._rows) else _MEMBERS_S

    def _leave(self, row: ServedRow) -> None:
        """What else goes with a row that is removed."""
        if isinstance(row, TargetRow) and row.ensemble is not None:
            self._ensembles.leave(row)
        if isinstance(row, TargetRow) and self._inside is not None:
            self._inside.leave(row)


def _wait_s(rows: list[TargetRow]) -> float:
    """How much longer the rows are worth waiting for, in seconds; 0: take the step."""
    now_s = time.perf_counter()
    return max((row.wait_s(now_s) for row in rows), default=0.0)
