"""The target loop: draft, verify, commit. It never waits for a draft longer than the draft is worth.

It trusts no message: drafts are hints that its own samples confirm or not, and a request is just tokens to continue.
It knows nothing of text, HTTP or which drafter made a draft.
"""

import time

import torch
from torch import Tensor

from actors.link import Link, Outbox
from actors.loop import LoopTimes
from actors.messages import Admit, Cancel, Commit, Drafting, Failed, Message, Offer
from actors.rows import Row, RowTable, choose_prefill
from actors.runner import RowInput, Runner
from decoding.drafts import DraftTrie
from decoding.sampling import SamplingBatch, sample
from decoding.stopping import cut_at_stop
from decoding.verify import accepted_lengths

_REPORT_PERIOD_S = 1.0
_PATIENCE = 1.5  # how many usual draft latencies to wait for a draft
_SMOOTHING = 0.1  # weight of the newest value in running means


class TargetRow(Row):
    """A request on the target: its draft trie, and until when it is worth waiting for a draft."""

    def __init__(self, peer: str, admit: Admit) -> None:
        super().__init__(peer, admit)
        self.trie = DraftTrie(self.tokens)
        self.expects_drafts = self.draft_length > 0
        self.incomplete_since_s: float | None = None  # when its draft began to be awaited
        self.deadline_s = 0.0

    @property
    def prefilling(self) -> bool:
        return self.pending > 1

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def usable_draft_length(self) -> int:
        """The draft length, or less where the request's end is near: the last token needs no draft."""
        return min(self.draft_length, self.params.max_tokens - self.generated - 1)

    def draft(self) -> list[int]:
        return self.trie.longest_path(self.usable_draft_length)

    def ready(self, now_s: float) -> bool:
        return not self.expects_drafts or now_s >= self.deadline_s or self.has_full_draft()

    def has_full_draft(self) -> bool:
        return len(self.draft()) >= self.usable_draft_length


class Target:
    """One replica of a target model."""

    def __init__(self, runner: Runner, link: Link, *, prefill_chunk: int = 256) -> None:
        """prefill_chunk: prompt tokens processed between two steps of the running rows."""
        self.times = LoopTimes()
        self._runner = runner
        self._link = link
        self._outbox = Outbox(link)
        self._prefill_chunk = prefill_chunk
        self._rows: RowTable[TargetRow] = RowTable(runner.cache)
        self._mean_step_s = 0.0
        self._mean_draft_latency_s: float | None = None  # from a commit to the full draft that follows it
        self._reported_at_s = 0.0

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; take one step with the running ones, once they are ready."""
        self._receive()
        prefilling = [row for row in self._rows if row.prefilling]
        if prefilling:
            self._prefill(choose_prefill(prefilling, self._prefill_chunk))
        running = [row for row in self._rows if not row.prefilling]
        if running and self._wait_s(running) == 0:
            self._step(running)
        self._report()
        self._outbox.flush()

    def _step(self, rows: list[TargetRow]) -> None:
        """One batched forward over every row's last token and its draft; each row commits one token or more."""
        began_s = time.perf_counter()
        drafts = [row.draft() for row in rows]
        logits = self._runner.forward(
            [RowInput(row.slot, row.cached, [row.tokens[-1], *draft]) for row, draft in zip(rows, drafts, strict=True)]
        )
        sampled = _sample_after_drafts(rows, logits)  # [B, Q]
        accepted = accepted_lengths(sampled, *_pad(drafts, logits.shape[1] - 1)).tolist()
        now_s = time.perf_counter()
        self.times.steps += 1
        self.times.step_s += now_s - began_s
        self._mean_step_s = _running_mean(self._mean_step_s or None, now_s - began_s)
        for row, draft, tokens, count in zip(rows, drafts, sampled.tolist(), accepted, strict=True):
            row.expects_drafts &= bool(
                draft
            )  # a drafter that missed its chance is waited for again after its next offer
            self._commit(row, tokens[: count + 1], drafted=len(draft), now_s=now_s)

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
                row.cached -= 1  # as in a step: the cache lacks the last token but one, then _commit counts it
                self._commit(row, [token], drafted=0, now_s=now_s)

    def _commit(self, row: TargetRow, tokens: list[int], *, drafted: int, now_s: float) -> None:
        """Append a step's accepted tokens and the target's own last one, and tell the coordinator."""
        peer, request_id = row.key
        kept, finish = cut_at_stop(tokens, row.generated, row.params)
        accepted = min(len(tokens) - 1, len(kept))
        self._outbox.put(peer, Commit(request_id, len(row.tokens), kept, drafted, accepted, finish))
        if finish is not None:
            self._rows.remove(row.key)
            return
        row.cached += len(tokens)
        row.trie.commit(kept)
        row.incomplete_since_s = None if row.has_full_draft() else now_s
        row.deadline_s = now_s + self._patience_s()

    def _patience_s(self) -> float:
        """How long a row waits for its draft: what drafts usually take, but never longer than a step."""
        if self._mean_draft_latency_s is None:
            return self._mean_step_s
        return min(_PATIENCE * self._mean_draft_latency_s, self._mean_step_s)

    def _wait_s(self, rows: list[TargetRow]) -> float:
        """Until when the rows are worth waiting for, in seconds from now; 0: take the step."""
        now_s = time.perf_counter()
        return max(0.0 if row.ready(now_s) else row.deadline_s - now_s for row in rows)

    def _receive(self) -> None:
        """Handle what has arrived; wait for more only while there is nothing to compute."""
        if any(row.prefilling for row in self._rows):
            timeout_s = 0.0
        elif len(self._rows):
            timeout_s = self._wait_s(list(self._rows))
        else:
            timeout_s = _REPORT_PERIOD_S
        began_s = time.perf_counter()
        envelopes = self._link.receive(timeout_s)
        waited_s = time.perf_counter() - began_s
        if len(self._rows):
            self.times.waited_s += waited_s
        else:
            self.times.idle_s += waited_s
        for peer, message in envelopes:
            self._handle(peer, message)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Offer(request_id, base, tokens):
                self._offer(self._rows.get((peer, request_id)), base, tokens)
            case Admit():
                self._admit(peer, message)
            case Cancel(request_id):
                self._rows.remove((peer, request_id))
            case Drafting(request_id, draft_length):
                row = self._rows.get((peer, request_id))
                if row is not None:
                    row.draft_length = draft_length
                    row.expects_drafts = draft_length > 0
            case _:
                raise TypeError(f"a target takes no {type(message).__name__}")

    def _admit(self, peer: str, message: Admit) -> None:
        needed = message.prompt_length + message.params.max_tokens
        if needed <= self._runner.max_length:
            self._rows.add(TargetRow(peer, message))
        else:
            error = f"the request needs {needed} positions, but the target has {self._runner.max_length}"
            self._outbox.put(peer, Failed(message.request_id, error))

    def _offer(self, row: TargetRow | None, base: int, tokens: list[int]) -> None:
        if row is None or not row.trie.offer(base, tokens):
            return
        row.expects_drafts = row.draft_length > 0
        if row.incomplete_since_s is not None and row.has_full_draft():
            latency_s = time.perf_counter() - row.incomplete_since_s
            self._mean_draft_latency_s = _running_mean(self._mean_draft_latency_s, latency_s)
            row.incomplete_since_s = None

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_at_s >= _REPORT_PERIOD_S:
            self._reported_at_s = now_s
            for peer in self._rows.peers():
                self._outbox.put(peer, self._rows.report())


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


def _running_mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _SMOOTHING * (value - mean)
