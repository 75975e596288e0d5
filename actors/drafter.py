"""The drafter loop: run ahead of the verdicts, up to a bounded lookahead, and offer what is new.

It samples with the target's noise and parameters on its own distribution, so that its tokens tend to be the target's.
It knows nothing of verification: commits tell it what the text became.
"""

import logging
import time

from actors.link import Link
from actors.loop import LoopTimes
from actors.messages import Admit, Commit, Failed, Message, Offer, Report
from actors.reception import REPORT_PERIOD_S, Reception
from actors.rows import Row, RowTable, choose_prefill, in_slot_order
from actors.runner import Runner
from decoding.sampling import SamplingBatch, sample

_log = logging.getLogger(__name__)
_CATCH_UP = 8  # rows with at most this many pending tokens go into the batched step, others are prefilled


class DrafterRow(Row):
    """A request on the drafter: its tokens are the committed ones, then its own draft."""

    def __init__(self, peer: str, admit: Admit, max_length: int) -> None:
        super().__init__(peer, admit)
        self.committed = len(self.tokens)
        self.follow(self.draft_length)
        self.end = min(self.prompt_length + self.params.max_tokens, max_length)  # no draft beyond

    def follow(self, draft_length: int) -> None:
        """Look ahead as far as pays: a draft under verification, its bonus token, and the next draft."""
        self.lookahead = 2 * draft_length + 1 if draft_length else 0

    @property
    def drafted(self) -> list[int]:
        return self.tokens[self.committed :]

    def wants_tokens(self) -> bool:
        return (
            len(self.tokens) < min(self.committed + self.lookahead, self.end)
            and self.tokens[-1] not in self.params.eos_token_ids
        )

    def commit(self, base: int, tokens: list[int]) -> None:
        """Follow the verdict: keep the draft as far as it agrees, and go on from the target's own token."""
        missed = tokens[self.committed - base :]
        drafted = self.drafted
        agreed = 0
        while agreed < len(missed) and agreed < len(drafted) and missed[agreed] == drafted[agreed]:
            agreed += 1
        if agreed < len(missed):
            self.tokens[self.committed + agreed :] = missed[agreed:]
            self.cached = min(self.cached, self.committed + agreed)
        self.committed += len(missed)


class Drafter:
    """One replica of a drafter model."""

    def __init__(self, runner: Runner, link: Link, *, prefill_chunk: int = 256) -> None:
        """prefill_chunk: prompt tokens processed between two steps of the running rows."""
        self.times = LoopTimes()
        self._runner = runner
        self._prefill_chunk = min(prefill_chunk, runner.max_query)
        self._rows: RowTable[DrafterRow] = RowTable(runner.cache)
        self._reception = Reception(link, self._rows, self.times)

    def load(self) -> Report:
        """The load at this moment; any thread may ask."""
        return self._rows.report()

    def turn(self) -> None:
        """Receive; prefill one chunk of the new rows; extend every other row's draft by one token; offer."""
        busy = any(row.wants_tokens() for row in self._rows)
        for peer, message in self._reception.receive(0.0 if busy else REPORT_PERIOD_S):
            self._handle(peer, message)
        wanting = [row for row in self._rows if row.wants_tokens()]
        behind = [row for row in wanting if row.pending > _CATCH_UP]
        if behind:
            self.times.prefill_s += self._extend(choose_prefill(behind, self._prefill_chunk), self._prefill_chunk)
        running = in_slot_order(row for row in wanting if row.pending <= _CATCH_UP)
        if running:
            self.times.steps += 1
            self.times.step_s += self._extend(running, _CATCH_UP)
        self._reception.close_turn()

    def _extend(self, rows: list[DrafterRow], chunk: int) -> float:
        """Run each row's pending tokens, at most `chunk`; rows that are up to date then get one more draft token.

        Returns the seconds it took.
        """
        began_s = time.perf_counter()
        inputs = [row.next_input(chunk) for row in rows]
        logits = self._runner.forward(inputs, last_only=True)  # [B, V]
        batch = SamplingBatch.build([(row.params, len(row.tokens)) for row in rows], logits.device)
        for row, run, token in zip(rows, inputs, sample(logits, batch).tolist(), strict=True):
            row.cached += len(run.tokens)
            if row.pending == 0:
                row.tokens.append(token)
                peer, request_id = row.key
                self._reception.put(peer, Offer(request_id, row.committed, row.drafted))
        return time.perf_counter() - began_s

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Commit():
                self._commit(peer, message)
            case Admit(request_id, tokens) if self._runner.knows(tokens):
                self._rows.add(DrafterRow(peer, message, self._runner.max_length))
            case Admit(request_id):
                self._reception.put(peer, Failed(request_id, "the drafter has no room for the text, or not its tokens"))
            case _:
                _log.warning("%s sent a %s, which is not for drafters", peer, type(message).__name__)

    def _commit(self, peer: str, message: Commit) -> None:
        """Follow a verdict, or give the request back where that is impossible."""
        row = self._rows.get((peer, message.request_id))
        if row is None:
            return
        if message.base > row.committed or not self._runner.knows(message.tokens):
            self._rows.remove(row.key)
            self._reception.put(
                peer, Failed(message.request_id, "a verdict was lost, or has tokens beyond the drafter's")
            )
            return
        row.commit(message.base, message.tokens)
        row.follow(message.draft_length)
