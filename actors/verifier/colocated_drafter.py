"""A drafter colocated with a target: on the same device, in the same thread, alternating with the target.

Each row gets one draft per step. Nothing is drafted ahead of verification, because drafting delays the step. The
drafter reads prompts chunk by chunk beside the target, so the first step after a prompt has a draft.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from msgspec import structs

from actors.drafter.loop import Drafter
from actors.loops.options import LoopOptions
from actors.loops.row import Row, RowKey
from actors.verifier.proposers import Delay, Proposer
from actors.verifier.rows import TargetRow
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Advance, Cancel, Failed, Heartbeat, ReplicaAddress
from decoding.drafts.draft import ProposerName
from engine.model.runner import Runner

_TARGET, _DRAFTER = "target", "drafter"


class ColocatedDrafter(Proposer):
    """The drafter of one target replica."""

    name: ProposerName = "drafter"

    def __init__(
        self, runner: Runner, has_tokens: Callable[[Sequence[int]], bool], options: LoopOptions = LoopOptions()
    ) -> None:
        """
        runner: the drafter's, with at least as many slots as the target's.
        has_tokens: says whether the target has these tokens; models that share a tokenizer may pad its vocabulary
            to different sizes.
        options: the target's loop options, with at most one draft mapping, which is for that target.
        """
        self._has_tokens = has_tokens
        self.delay: Delay = Delay(0.0, 0.0)
        exchange = LocalExchange()
        self._link = exchange.join(_TARGET)
        self._drafter = Drafter(runner, exchange.join(_DRAFTER), options, alternatives=0, ahead=False)
        self._address = ReplicaAddress(_TARGET, model=next(iter(options.draft_mappings), _TARGET))
        self._sent_lengths: dict[RowKey, int] = {}  # how many of each row's tokens were sent to the drafter
        self._rows: dict[int, TargetRow] = {}  # the same rows, by request

    def drafts_for(self, row: TargetRow) -> bool:
        return row.drafts.drafter

    @property
    def reading(self) -> bool:
        """Whether the drafter is in the middle of reading a text."""
        return self._drafter.reading

    def read(self, rows: Iterable[TargetRow]) -> bool:
        """Read a chunk of the rows' texts, which the target reads or has read. Returns whether there was one."""
        new = [row for row in rows if row.drafts.drafter and row.slot >= 0 and row.key not in self._sent_lengths]
        if not new and not self.reading:
            return False
        self._link.send(_DRAFTER, [Heartbeat(), *map(self._update, new)])
        self._drafter.turn(steps=False)
        return True

    def propose(self, rows: Sequence[TargetRow]) -> set[RowKey]:
        """Draft what follows each row's text, and put the drafts into the rows' tries. `read` long texts first.

        Returns the rows that got a draft.
        """
        before = replace(self._drafter.times)
        drafted = {row.key[1]: row for row in rows if row.drafts.drafter}
        self._link.send(_DRAFTER, [Heartbeat(), *map(self._update, drafted.values())])
        self._drafter.turn(reads=False)
        while self._drafter.drafting and self._drafter.times.preemptions == before.preemptions:
            self._drafter.turn(reads=False)  # after a preemption pages are short: the target doesn't wait for the rest
        for _, message in self._link.receive(0.0):
            if isinstance(message, Failed):
                self._give_up(message)
        offers = self._drafter.offers((_TARGET, request_id) for request_id in drafted)
        offered = {
            drafted[offer.request_id].key
            for offer in offers
            if self._has_tokens(offer.all_tokens()) and drafted[offer.request_id].drafts.offer(offer)
        }
        spent = self._drafter.times - before
        token_s = spent.step_s / spent.steps if spent.steps else 0.0
        self.delay = Delay(token_s, token_s)
        return offered

    def remove(self, row: Row) -> None:
        if self._sent_lengths.pop(row.key, None) is not None:
            del self._rows[row.key[1]]
            self._link.send(_DRAFTER, [Cancel(row.key[1])])

    def _give_up(self, failed: Failed) -> None:
        """Let a row go on without the drafter, which has forgotten it."""
        row = self._rows.get(failed.request_id)
        if row is not None and row.admission == failed.admission:
            row.drafts.drafter = False
            del self._rows[failed.request_id], self._sent_lengths[row.key]

    def _update(self, row: TargetRow) -> Admit | Advance:
        request_id, sent = row.key[1], self._sent_lengths.get(row.key)
        self._sent_lengths[row.key] = len(row.tokens)
        self._rows[request_id] = row
        if sent is not None:
            return structs.replace(row.drafts.advance(sent, row.drafts.in_step_length), coordinator=_TARGET)
        return Admit(
            request_id=request_id,
            tokens=list(row.tokens),
            prompt_length=row.prompt_length,
            params=row.params,
            draft_length=row.drafts.in_step_length,
            drafter=True,
            target=self._address,
            admission=row.admission,
            cache_salt=row.cache_salt,
            adapter=row.adapter and row.adapter.drafter,
            arrived_at_s=row.arrived_at_s,
        )
