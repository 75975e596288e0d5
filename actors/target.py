"""The target loop: draft, verify, commit. It never waits for a draft longer than the draft is worth.

It trusts no message: drafts are hints that its own samples confirm or not, and a request is just tokens to continue.
It knows nothing of text, HTTP or which drafter made a draft.
"""

import logging
import time
from itertools import islice

from torch import Tensor

from actors.draft_planner import DraftPlanner
from actors.link import Link
from actors.loop import LoopTimes
from actors.messages import Admit, Commit, Drafting, Failed, Message, Offer, Report
from actors.reception import REPORT_PERIOD_S, Reception
from actors.row_input import RowInput
from actors.rows import RowTable, choose_prefill, in_slot_order
from actors.runner import Runner
from actors.target_row import TargetRow
from decoding.drafts import Draft
from decoding.sampling import SamplingBatch, sample
from decoding.stopping import cut_at_stop
from decoding.verify import accepted_path

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
        inputs = [_verify_input(row, draft) for row, draft in zip(rows, drafts, strict=True)]
        sampled = _sample_after_drafts(rows, drafts, self._runner.logits(inputs))
        now_s = time.perf_counter()
        self.times.steps += 1
        self.times.step_s += now_s - began_s
        self._planner.note_step(sum(map(len, sampled)), now_s - began_s)
        self._receive(0.0)  # what was offered meanwhile is there for the verdict
        committed = 0
        for row, draft, tokens in zip(rows, drafts, sampled, strict=True):
            if self._rows.get(row.key) is row:
                committed += self._judge(row, draft, tokens)
        self._planner.note_round(rows, committed, now_s - began_s + self.times.waited_s - self._waited_before_s)
        self._waited_before_s = self.times.waited_s
        self._plan(rows)

    def _judge(self, row: TargetRow, draft: Draft, sampled: list[int]) -> int:
        """Commit what the target chose: of the draft, then the first token of its own. sampled: [K + 1].

        Returns how many tokens that is.
        """
        path, disagrees = accepted_path(sampled, draft)
        self._planner.note_verdict(row, drafted=len(path) + disagrees, accepted=len(path))
        self._runner.keep(row.slot, row.cached + 1, [row.cached + 1 + place for place in path])
        own = sampled[path[-1] + 1 if path else 0]
        tokens = [*(draft.tokens[place] for place in path), own]
        self._commit(row, tokens, drafted=len(draft.tokens), disagrees=disagrees)
        return len(tokens)

    def _prefill(self, rows: list[TargetRow]) -> None:
        """One chunk of each row's pending tokens; a row whose last chunk this was commits its first token."""
        began_s = time.perf_counter()
        chunks = [row.next_input(self._prefill_chunk) for row in rows]
        logits = self._runner.logits(chunks, last_only=True)  # [B, V]
        batch = SamplingBatch.build([(row.params, len(row.tokens)) for row in rows], logits.device)
        sampled = sample(logits, batch).tolist()
        now_s = time.perf_counter()
        self.times.prefill_s += now_s - began_s
        self._receive(0.0)
        for row, chunk, token in zip(rows, chunks, sampled, strict=True):
            row.cached += len(chunk.tokens)
            if row.pending == 0 and self._rows.get(row.key) is row:
                row.cached -= 1  # as in a step, where the cache lacks the last token: _commit counts it
                self._commit(row, [token], drafted=0, disagrees=False)
        self._plan([row for row in rows if not row.prefilling])

    def _commit(self, row: TargetRow, tokens: list[int], *, drafted: int, disagrees: bool) -> None:
        """Append a step's accepted tokens and the target's own last one, and tell the coordinator.

        drafted: how many were verified. disagrees: the last token is not what was drafted in its place.
        """
        peer, request_id = row.key
        kept, finish = cut_at_stop(tokens, row.generated, row.params)
        accepted = min(len(tokens) - 1, len(kept))
        # as of the step before, which is soon enough for the drafter
        useful = row.useful_draft_length if self._rows.drafting else 0
        base = len(row.tokens)
        row.cached += len(tokens)
        row.trie.commit(kept)
        hit = bool(row.trie) if disagrees and finish is None else None
        self._reception.put(peer, Commit(request_id, base, kept, drafted, accepted, finish, useful, hit))
        if finish is not None:
            self._rows.remove(row.key)

    def _plan(self, committed: list[TargetRow]) -> None:
        """Decide what the rows that just committed wait for."""
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
            case Offer(request_id, base, tokens, parents, chances):
                row = self._rows.get((peer, request_id))
                if row is not None and self._runner.knows(tokens) and row.trie.offer(base, tokens, parents, chances):
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


def _verify_input(row: TargetRow, draft: Draft) -> RowInput:
    """The row's last token and its draft; K + 1 tokens, of which the cache holds none yet."""
    tokens = [row.tokens[-1], *draft.tokens]
    if draft.is_chain:
        return RowInput(row.slot, row.cached, tokens)
    paths = [[row.cached]]
    for place, parent in enumerate(draft.parents):
        paths.append([*paths[parent + 1], row.cached + 1 + place])
    return RowInput(row.slot, row.cached, tokens, trunk=row.cached, paths=paths)


def _sample_after_drafts(rows: list[TargetRow], drafts: list[Draft], logits: Tensor) -> list[list[int]]:
    """The target's own tokens after each row's last token and after each of its draft tokens; K + 1 of each row.

    Siblings in a tree stand at the same position, so they see the same noise. logits: [N, V], row after row.
    """
    depths = [[0, *draft.depths()] for draft in drafts]
    positions = [
        (row.params, len(row.tokens) + depth) for row, below in zip(rows, depths, strict=True) for depth in below
    ]
    sampled = iter(sample(logits, SamplingBatch.build(positions, logits.device)).tolist())
    return [list(islice(sampled, len(below))) for below in depths]
