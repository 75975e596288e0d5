"""The target loop: draft, verify, commit. It never waits for a draft longer than the draft is worth.

It trusts no message: drafts are hints that its own samples confirm or not, and a request is just tokens to continue.
It knows nothing of text, HTTP or which drafter made a draft.
"""

import logging
import time

import torch
from torch import Tensor

from actors.draft_planner import DraftPlanner
from actors.link import Link
from actors.loop import LoopTimes
from actors.messages import Admit, Commit, Drafting, Failed, Message, Offer, Report
from actors.reception import REPORT_PERIOD_S, Reception
from actors.rows import RowTable, choose_prefill, in_slot_order
from actors.runner import RowInput, Runner
from actors.target_row import TargetRow
from decoding.sampling import SamplingBatch, sample
from decoding.stopping import cut_at_stop
from decoding.verify import accepted_lengths

_log = logging.getLogger(__name__)


class Target:
    """One replica of a target model."""

    def __init__(self, runner: Runner, link: Link, *, prefill_chunk: int = 256, adaptive: bool = True) -> None:
        """
        prefill_chunk: prompt tokens processed between two steps of the running rows.
        adaptive: verify as many draft tokens as pay; otherwise always as many as the request allows.
        """
        self.times = LoopTimes()
        self._runner = runner
        self._prefill_chunk = min(prefill_chunk, runner.max_query)
        self._rows: RowTable[TargetRow] = RowTable(runner.cache)
        self._reception = Reception(link, self._rows, self.times)
        self._planner = DraftPlanner(runner, adaptive=adaptive)

    def load(self) -> Report:
        """The load at this moment; any thread may ask."""
        return self._rows.report()

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; take one step with the running ones, once they are ready."""
        self._receive(self._timeout_s())
        prefilling = [row for row in self._rows if row.prefilling]
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
        logits = self._runner.forward(
            [RowInput(row.slot, row.cached, [row.tokens[-1], *draft]) for row, draft in zip(rows, drafts, strict=True)]
        )
        sampled = _sample_after_drafts(rows, logits)  # [B, Q]
        accepted = accepted_lengths(sampled, *_pad(drafts, logits.shape[1] - 1)).tolist()
        now_s = time.perf_counter()
        self.times.steps += 1
        self.times.step_s += now_s - began_s
        self._planner.note_step(sampled.numel(), now_s - began_s)
        for row, draft, tokens, count in zip(rows, drafts, sampled.tolist(), accepted, strict=True):
            self._planner.note_verdict(row, drafted=len(draft), accepted=count)
            self._commit(row, tokens[: count + 1], drafted=len(draft))
        self._plan(rows)

    def _prefill(self, rows: list[TargetRow]) -> None:
        """One chunk of each row's pending tokens; a row whose last chunk this was commits its first token."""
        began_s = time.perf_counter()
        chunks = [row.next_input(self._prefill_chunk) for row in rows]
        logits = self._runner.forward(chunks, last_only=True)  # [B, V]
        batch = SamplingBatch.build([(row.params, len(row.tokens)) for row in rows], logits.device)
        sampled = sample(logits, batch).tolist()
        now_s = time.perf_counter()
        self.times.prefill_s += now_s - began_s
        for row, chunk, token in zip(rows, chunks, sampled, strict=True):
            row.cached += len(chunk.tokens)
            if row.pending == 0:
                row.cached -= 1  # as in a step, where the cache lacks the last token: _commit counts it
                self._commit(row, [token], drafted=0)
        self._plan([row for row in rows if not row.prefilling])

    def _commit(self, row: TargetRow, tokens: list[int], *, drafted: int) -> None:
        """Append a step's accepted tokens and the target's own last one, and tell the coordinator."""
        peer, request_id = row.key
        kept, finish = cut_at_stop(tokens, row.generated, row.params)
        accepted = min(len(tokens) - 1, len(kept))
        useful = row.useful_draft_length  # as of the step before, which is soon enough for the drafter
        self._reception.put(peer, Commit(request_id, len(row.tokens), kept, drafted, accepted, finish, useful))
        row.cached += len(tokens)
        row.trie.commit(kept)
        if finish is not None:
            self._rows.remove(row.key)

    def _plan(self, committed: list[TargetRow]) -> None:
        """Look at the offers that came meanwhile, then decide what the rows that just committed wait for."""
        self._receive(0.0)
        self._planner.plan(self._running(), {row.key for row in committed}, time.perf_counter())

    def _running(self) -> list[TargetRow]:
        return in_slot_order(row for row in self._rows if not row.prefilling)

    def _receive(self, timeout_s: float) -> None:
        for peer, message in self._reception.receive(timeout_s):
            self._handle(peer, message)

    def _timeout_s(self) -> float:
        """How long to wait for messages: not at all while there is something to compute."""
        if any(row.prefilling for row in self._rows):
            return 0.0
        return _wait_s(list(self._rows)) if len(self._rows) else REPORT_PERIOD_S

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Offer(request_id, base, tokens):
                row = self._rows.get((peer, request_id))
                if row is not None and self._runner.knows(tokens) and row.trie.offer(base, tokens):
                    self._planner.note_offer(row, time.perf_counter())
            case Admit():
                self._admit(peer, message)
            case Drafting(request_id, draft_length):
                row = self._rows.get((peer, request_id))
                if row is not None:
                    row.draft_length = draft_length
                    row.expects_drafts = draft_length > 0
            case _:
                _log.warning("%s sent a %s, which is not for targets", peer, type(message).__name__)

    def _admit(self, peer: str, message: Admit) -> None:
        needed = message.prompt_length + message.params.max_tokens
        if needed > self._runner.max_length:
            error = f"the request needs {needed} positions, but the target has {self._runner.max_length}"
        elif not self._runner.knows(message.tokens):
            error = f"the prompt is empty, or has tokens outside the target's vocabulary of {self._runner.vocab_size}"
        else:
            self._rows.add(TargetRow(peer, message, acceptance=self._planner.acceptance))
            return
        self._reception.put(peer, Failed(message.request_id, error))


def _wait_s(rows: list[TargetRow]) -> float:
    """How much longer the rows are worth waiting for, in seconds; 0: take the step."""
    now_s = time.perf_counter()
    return max(row.wait_s(now_s) for row in rows)


def _sample_after_drafts(rows: list[TargetRow], logits: Tensor) -> Tensor:
    """The target's own token after each query token. logits: [B, Q, V]; returns [B, Q] int64 on the CPU."""
    width = logits.shape[1]
    positions = [(row.params, len(row.tokens) + j) for row in rows for j in range(width)]
    sampled = sample(logits.flatten(0, 1), SamplingBatch.build(positions, logits.device))
    return sampled.view(-1, width).cpu()


def _pad(drafts: list[list[int]], width: int) -> tuple[Tensor, Tensor]:
    """Ragged drafts as [B, K] int64, padded on the right to K = width, and their lengths, [B] int64."""
    padded = [[*draft, *[0] * (width - len(draft))] for draft in drafts]
    tokens = torch.tensor(padded, dtype=torch.int64).view(len(drafts), width)
    return tokens, torch.tensor([len(draft) for draft in drafts])
