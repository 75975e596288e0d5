"""A drafter inside a target's process: on the same device, by turns with the target, in the same thread.

There each draft costs the time that it takes, so there is exactly one per step and none ahead of the verdicts; but no
message has to travel, nobody waits, and both models have the whole device in their turn. It knows nothing of
coordinators: to them, its target drafts for itself.
"""

from collections.abc import Sequence
from dataclasses import replace

from msgspec import structs

from actors.drafter.loop import Drafter
from actors.loops.grammar_jobs import LoadTokenizer
from actors.loops.row_table import RowKey
from actors.model.runner import Runner
from actors.target.row import TargetRow
from actors.tokenizers.draft_mapping import DraftMapping
from actors.wire.addresses import ReplicaAddress
from actors.wire.link import LocalExchange
from actors.wire.messages import Admit, Advance, Cancel, Failed, Heartbeat

_TARGET, _DRAFTER = "target", "drafter"
_ADDRESS = ReplicaAddress(_TARGET, _TARGET)


class ColocatedDrafter:
    """The drafter of one target replica."""

    def __init__(
        self,
        runner: Runner,
        *,
        prefill_chunk: int = 256,
        load_tokenizer: LoadTokenizer | None = None,
        draft_mapping: DraftMapping | None = None,
    ) -> None:
        """
        runner: over as many slots as the target's, at least.
        prefill_chunk, load_tokenizer: as `Drafter` has them.
        draft_mapping: where the target has another tokenizer.
        """
        exchange = LocalExchange()
        self._link = exchange.join(_TARGET)
        self._drafter = Drafter(
            runner,
            exchange.join(_DRAFTER),
            prefill_chunk=prefill_chunk,
            alternatives=0,
            ahead=False,
            load_tokenizer=load_tokenizer,
            draft_mappings={} if draft_mapping is None else {_TARGET: draft_mapping},
        )
        self._told: dict[RowKey, int] = {}  # how much of each row's text the drafter knows

    def draft(self, rows: Sequence[TargetRow]) -> float | None:
        """Put drafts of what follows their texts into the rows' tries. A prompt that is new may take several calls.

        Returns the mean seconds of a draft token of all rows together; None if there was none.
        """
        before = replace(self._drafter.times)
        drafted = {row.key[1]: row for row in rows if row.drafter}
        self._link.send(_DRAFTER, [Heartbeat(), *map(self._news, drafted.values())])
        self._drafter.turn()
        while self._drafter.drafting:
            self._drafter.turn()
        for _, message in self._link.receive(0.0):
            if isinstance(message, Failed) and message.request_id in drafted:  # else it has left, or sits out this step
                drafted[message.request_id].drafter = False
        for offer in self._drafter.offers((_TARGET, request_id) for request_id in drafted):
            drafted[offer.request_id].offer(offer)
        spent = self._drafter.times - before
        return spent.step_s / spent.steps if spent.steps else None

    def leave(self, row: TargetRow) -> None:
        """The row is no more."""
        if self._told.pop(row.key, None) is not None:
            self._link.send(_DRAFTER, [Cancel(row.key[1])])

    def _news(self, row: TargetRow) -> Admit | Advance:
        """What lets the drafter follow the row's text."""
        request_id, known = row.key[1], self._told.get(row.key)
        self._told[row.key] = len(row.tokens)
        if known is not None:
            return structs.replace(row.advance(known, row.useful_draft_length), coordinator=_TARGET)
        return Admit(
            request_id=request_id,
            tokens=list(row.tokens),
            prompt_length=row.prompt_length,
            params=row.params,
            draft_length=row.useful_draft_length,
            drafter=True,
            target=_ADDRESS,
            admission=row.admission,
        )
