"""The target loop: draft, verify, commit. It never waits for a draft longer than the draft is worth.

It trusts no message: drafts are hints that its own samples confirm or not, and a request is just tokens to continue.
It knows nothing of text, HTTP or which drafter made a draft.
"""

import logging
import time

import torch
from msgspec.structs import replace
from torch import Tensor

from actors.draft_planner import DraftPlanner
from actors.link import Link
from actors.loop import LoopTimes
from actors.messages import Admit, Commit, Drafting, Failed, Message, Offer, Report
from actors.reception import REPORT_PERIOD_S, Reception
from actors.row_input import RowInput
from actors.rows import PREPARING_S, RowTable, choose_prefill, in_slot_order
from actors.runner import Runner
from actors.structures import LoadTokenizer, Structures
from actors.target_row import TargetRow
from actors.verdict import Verdict, judge
from decoding.drafts import Draft
from decoding.mask_threads import MaskThreads
from decoding.ngram import NgramProposers
from decoding.stopping import cut_at_stop

_log = logging.getLogger(__name__)


class Target:
    """One replica of a target model."""

    def __init__(
        self,
        runner: Runner,
        link: Link,
        *,
        prefill_chunk: int = 256,
        adaptive: bool = True,
        load_tokenizer: LoadTokenizer | None = None,
    ) -> None:
        """
        prefill_chunk: prompt tokens processed between two steps of the running rows.
        load_tokenizer: for structured answers.
        adaptive: verify as many draft tokens as pay; otherwise always as many as the request allows.
        """
        self.times = LoopTimes()
        self._runner = runner
        self._prefill_chunk = min(prefill_chunk, runner.max_query)
        self._rows: RowTable[TargetRow] = RowTable(runner.cache)
        self._reception = Reception(link, self._rows, self.times)
        self._planner = DraftPlanner(runner, adaptive=adaptive)
        self._structures = Structures(load_tokenizer, runner.vocab_size)
        self._masks = MaskThreads()
        self._ngrams = NgramProposers()
        self._waited_before_s = 0.0  # for drafts, up to the step before

    def load(self) -> Report:
        """The load at this moment; any thread may ask."""
        return self._rows.report()

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; take one step with the running ones, once they are ready."""
        self._receive(self._timeout_s())
        if len(self._rows):
            self._planner.rows_in_hand = len(self._rows)
            self._rows.drafting = self._planner.speculates()
        for row, error in self._rows.make_ready():
            self._fail(row, str(error))
        prefilling = [row for row in self._rows if row.prefilling and row.ready]
        if prefilling:
            self._prefill(choose_prefill(prefilling, self._prefill_chunk))
        running = self._running()
        if running and _wait_s(running) == 0:
            self._step(running)
        self._reception.close_turn()

    def _step(self, rows: list[TargetRow]) -> None:
        """One batched forward over every row's last token and its draft; each row commits one token or more."""
        began_s = time.perf_counter()
        drafts = self._planner.choose(rows, began_s)
        masks = self._masks.start([row.structure for row in rows], drafts)
        inputs = [_verify_input(row, draft) for row, draft in zip(rows, drafts, strict=True)]
        verdicts = judge(rows, drafts, self._runner.logits(inputs), masks())
        now_s = time.perf_counter()
        self.times.steps += 1
        self.times.step_s += now_s - began_s
        self._planner.note_step(sum(len(run.tokens) for run in inputs), now_s - began_s)
        self._receive(0.0)  # what was offered meanwhile is there for the verdict
        committed = 0
        for row, draft, verdict in zip(rows, drafts, verdicts, strict=True):
            if self._rows.get(row.key) is row:
                committed += self._follow(row, draft, verdict)
        self._planner.note_round(rows, committed, now_s - began_s + self.times.waited_s - self._waited_before_s)
        self._waited_before_s = self.times.waited_s
        self._plan(rows)

    def _follow(self, row: TargetRow, draft: Draft, verdict: Verdict) -> int:
        """Commit what the target chose: of the draft, then the first token of its own. Returns how many tokens."""
        path = verdict.path
        if row.structure is not None:
            error = row.structure.error_after(path[-1] if path else -1)
            if error is not None:
                self._fail(row, str(error))
                return 0
        self._planner.note_verdict(row, drafted=len(path) + verdict.rejected, accepted=len(path))
        self._runner.keep(row.slot, row.cached + 1, [row.cached + 1 + place for place in path])
        self._commit(row, draft, verdict)
        return len(path) + 1

    def _prefill(self, rows: list[TargetRow]) -> None:
        """One chunk of each row's pending tokens; a row whose last chunk this was commits its first token."""
        began_s = time.perf_counter()
        chunks = [row.next_input(self._prefill_chunk) for row in rows]
        last = self._last_logits(rows, chunks)  # [B, V]
        drafts = [Draft([], []) for _ in rows]
        masks = self._masks.start([row.structure for row in rows], drafts)
        verdicts = judge(rows, drafts, last, masks())
        self.times.prefill_s += time.perf_counter() - began_s
        self._receive(0.0)
        for row, chunk, draft, verdict in zip(rows, chunks, drafts, verdicts, strict=True):
            row.cached += len(chunk.tokens)
            if row.pending == 0 and self._rows.get(row.key) is row:
                row.cached -= 1  # as in a step, where the cache lacks the last token: _commit counts it
                self._commit(row, draft, verdict)
        self._plan([row for row in rows if not row.prefilling])

    def _last_logits(self, rows: list[TargetRow], chunks: list[RowInput]) -> Tensor:
        """The logits after each chunk, [B, V]; of rows that want the prompt's log-probabilities, those on the way."""
        if not any(row.wants_prompt_logprobs for row in rows):
            return self._runner.logits(chunks, last_only=True)
        logits = self._runner.logits(chunks)  # [N, V]
        start = 0
        ends = []
        for row, chunk in zip(rows, chunks, strict=True):
            ends.append(start + len(chunk.tokens) - 1)
            if row.wants_prompt_logprobs:
                row.note_prompt(chunk, logits[start : ends[-1] + 1])
            start = ends[-1] + 1
        return logits[torch.tensor(ends, device=logits.device)]

    def _commit(self, row: TargetRow, draft: Draft, verdict: Verdict) -> None:
        """Append a step's accepted tokens and the target's own last one, and tell the coordinator."""
        peer, request_id = row.key
        tokens = [*(draft.tokens[place] for place in verdict.path), verdict.own]
        kept, finish = cut_at_stop(tokens, row.generated, row.params)
        commit = Commit(
            request_id=request_id,
            base=len(row.tokens),
            tokens=kept,
            drafted=len(draft.tokens),
            accepted=min(len(verdict.path), len(kept)),
            finish=finish,
            # as of the step before, which is soon enough for the drafter
            draft_length=row.useful_draft_length if self._rows.drafting else 0,
            logprobs=verdict.logprobs and verdict.logprobs[: len(kept)],
            prompt_logprobs=row.prompt_logprobs if row.generated == 0 and row.wants_prompt_logprobs else None,
        )
        row.cached += len(tokens)
        row.commit(kept, rejected=verdict.rejected)
        if finish is None and verdict.rejected:
            commit = replace(commit, rejected=True, hit=bool(row.trie))
        self._reception.put(peer, commit)
        if finish is not None:
            self._rows.remove(row.key)
        elif self._rows.drafting:
            row.propose()

    def _plan(self, committed: list[TargetRow]) -> None:
        """Decide what the rows that just committed wait for."""
        self._planner.plan(self._running(), {row.key for row in committed}, time.perf_counter())

    def _running(self) -> list[TargetRow]:
        return in_slot_order(row for row in self._rows if row.ready and not row.prefilling)

    def _receive(self, timeout_s: float) -> None:
        for peer, message in self._reception.receive(timeout_s):
            self._handle(peer, message)

    def _timeout_s(self) -> float:
        """How long to wait for messages: not at all while there is something to compute."""
        if any(row.prefilling and row.ready for row in self._rows):
            return 0.0
        running = self._running()
        if running:
            return _wait_s(running)
        return PREPARING_S if len(self._rows) else REPORT_PERIOD_S

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Offer(request_id, _, tokens):
                row = self._rows.get((peer, request_id))
                if row is not None and self._runner.knows(tokens):
                    fits = row.offer(message)
                    if fits or row.params.rejects:  # what is drawn by chance never fits when it is late
                        self._planner.note_offer(row, time.perf_counter())
            case Admit():
                self._admit(peer, message)
            case Drafting(request_id, attached):
                row = self._rows.get((peer, request_id))
                if row is not None:
                    row.drafter = row.expects_drafts = attached
            case _:
                _log.warning("%s sent a %s, which is not for targets", peer, type(message).__name__)

    def _fail(self, row: TargetRow, error: str) -> None:
        self._rows.remove(row.key)
        self._reception.put(row.key[0], Failed(row.key[1], error))

    def _admit(self, peer: str, message: Admit) -> None:
        needed = message.prompt_length + message.params.max_tokens
        if needed > self._runner.max_length:
            error = f"the request needs {needed} positions, but the target has {self._runner.max_length}"
        elif not self._runner.knows(message.tokens):
            error = f"the prompt is empty, or has tokens outside the target's vocabulary of {self._runner.vocab_size}"
        else:
            options = message.ngram
            proposer = None if options is None else self._ngrams.make(options, message.draft_length)
            row = TargetRow(peer, message, acceptance=self._planner.acceptance, proposer=proposer)
            self._structures.begin(row)
            self._rows.add(row)
            return
        self._reception.put(peer, Failed(message.request_id, error))


def _wait_s(rows: list[TargetRow]) -> float:
    """How much longer the rows are worth waiting for, in seconds; 0: take the step."""
    now_s = time.perf_counter()
    return max(row.wait_s(now_s) for row in rows)


def _verify_input(row: TargetRow, draft: Draft) -> RowInput:
    """The row's last token and its draft; K + 1 tokens, of which the cache holds none yet."""
    tokens = [row.tokens[-1], *draft.tokens]
    if draft.is_chain:
        return RowInput(row.slot, row.cached, tokens)
    paths = [[row.cached]]
    for place, parent in enumerate(draft.parents):
        paths.append([*paths[parent + 1], row.cached + 1 + place])
    return RowInput(row.slot, row.cached, tokens, trunk=row.cached, paths=paths)
