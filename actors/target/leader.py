"""A target as the leader of ensembles: invites members, asks them about drafts, gathers what they answer.

Nobody waits: while members think, the leader serves other requests, ensembles that it is a member of among them.
"""

from collections.abc import Callable

import torch

from actors.ensemble.rounds import EnsembleRounds
from actors.model.runner import Runner
from actors.target.row import TargetRow
from actors.wire.link import ConnectingLink
from actors.wire.logits_codec import LogitsTransport, unpack
from actors.wire.logits_memory import SharedLogits, SharedOffer, offer
from actors.wire.messages import (
    Cancel,
    Ensemble,
    Failed,
    Join,
    Joined,
    LogitsReply,
    LogitsRequest,
    MemberLost,
    Message,
    Report,
)
from decoding.errors import ConsortError, UnavailableError

Send = Callable[[str, Message], None]
FromMember = Joined | LogitsReply | MemberLost | Failed  # or about one
_Place = tuple[int, str]  # a request, and a member's replica

_LOST = 3  # reports of a member that has not answered: one may be on its way already, one be from the turn before
_IDLE_S = 60.0
_PADDING = 1024  # vocabularies that are the same may be padded to other sizes


class EnsembleLeader:
    """Those that one target leads. Requests are known by their ids, which are unique among all coordinators."""

    def __init__(self, link: ConnectingLink, send: Send, runner: Runner) -> None:
        """runner: the leader's."""
        self._link, self._send, self._runner = link, send, runner
        self._rows: dict[int, TargetRow] = {}
        self._used_at_s: dict[str, float] = {}  # by connected replica
        self._unanswered: dict[
            _Place, tuple[Join | LogitsRequest, int]
        ] = {}  # and how often the member has reported since
        self._shared: dict[_Place, SharedLogits] = {}

    def begin(self, row: TargetRow, ensemble: Ensemble, now_s: float) -> None:
        """Invite the members of a new row's ensemble."""
        row.ensemble = EnsembleRounds(ensemble, now_s)
        row.ensemble.told = len(row.tokens)
        self._rows[row.key[1]] = row
        for member in ensemble.members:
            if member.address is not None:
                replica = member.address.name
                if replica not in self._used_at_s:
                    self._link.connect(member.address)
                self._used_at_s[replica] = now_s
                shared = self._share(row, replica) if member.address.uri else None
                join = Join(
                    row.key[1],
                    list(row.tokens),
                    ensemble.leader,
                    row.prompt_length,
                    best_count=ensemble.options.best_count,
                    shared=shared,
                    admission=row.admission,
                )
                self._put((row.key[1], replica), join)

    def _share(self, row: TargetRow, replica: str) -> SharedOffer | None:
        """Memory for the answers of a member that may be on the same node."""
        room = (row.draft_length + 1) * (self._runner.vocab_size + _PADDING) * torch.float32.itemsize
        offered = offer(room)
        if offered is None:
            return None
        self._shared[row.key[1], replica] = offered[0]
        return offered[1]

    def _put(self, place: _Place, message: Join | LogitsRequest) -> None:
        self._unanswered[place] = message, 0
        self._send(place[1], message)

    def ask(self, row: TargetRow, ensemble: EnsembleRounds) -> None:
        """Send the round that has begun to the other members."""
        assert ensemble.round is not None
        draft = ensemble.round.draft
        ask = LogitsRequest(
            request_id=row.key[1],
            step=ensemble.round.step,
            base=ensemble.told,
            text=row.tokens[ensemble.told :],
            tokens=draft.tokens,
            parents=draft.parents,
            transport=LogitsTransport(ensemble.options.member_dtype, ensemble.options.member_top_k),
            admission=row.admission,
        )
        ensemble.told = len(row.tokens)
        for replica in ensemble.others:
            self._put((row.key[1], replica), ask)

    def reconcile(self, replica: str, report: Report) -> None:
        """Make what a member works on for this leader what it should: whatever was lost on the way comes right here."""
        for request_id in report.request_ids:
            row = self._rows.get(request_id)
            if row is None or row.ensemble is None or replica not in row.ensemble.others:
                self._send(replica, Cancel(request_id))
        self._ask_again(replica)

    def _ask_again(self, replica: str) -> None:
        """A member reports after it has answered. What it has not answered by then was lost on the way."""
        for place, (message, reports) in list(self._unanswered.items()):
            if place[1] == replica:
                self._unanswered[place] = message, reports + 1
                if reports + 1 == _LOST:
                    self._put(place, message)

    def take(
        self, replica: str, message: Joined | LogitsReply | MemberLost | Failed, now_s: float
    ) -> tuple[TargetRow, ConsortError] | None:
        """Take what is said by a member, or about one. Returns the row that must fail because of it, and why."""
        row = self._rows.get(message.request_id)
        if row is None or row.ensemble is None:
            return None
        try:
            if isinstance(message, MemberLost):
                self._drop(row, row.ensemble, message.replica, "is gone")
            elif message.admission == row.admission and replica in row.ensemble.others:
                self._take(row, row.ensemble, replica, message, now_s)
        except ConsortError as error:
            return row, error
        except ValueError as error:
            return row, UnavailableError(f"a member's answer makes no sense: {error}")
        return None

    def _take(
        self,
        row: TargetRow,
        ensemble: EnsembleRounds,
        replica: str,
        message: Joined | LogitsReply | Failed,
        now_s: float,
    ) -> None:
        place = row.key[1], replica
        match message:
            case Joined():
                ensemble.join(replica)
                self._answered(place, step=0)
            case LogitsReply(_, step, logits, best):
                unpacked = unpack(logits, self._runner.device, self._shared.get(place))
                ensemble.take(replica, step, unpacked, best, now_s)
                self._answered(place, step)
            case Failed(_, error):
                self._drop(row, ensemble, replica, f"failed: {error}")

    def _drop(self, row: TargetRow, ensemble: EnsembleRounds, replica: str, reason: str) -> None:
        """Go on without a member, which may forget the request.

        Raises:
            UnavailableError: the ensemble can't go on without it.
        """
        if replica in ensemble.others:
            self._release(row.key[1], replica)
            ensemble.lose(replica, reason)

    def _release(self, request_id: int, replica: str) -> None:
        """Let a member forget a request, and forget what was asked of it."""
        self._send(replica, Cancel(request_id))
        self._unanswered.pop((request_id, replica), None)
        shared = self._shared.pop((request_id, replica), None)
        if shared is not None:
            shared.withdraw()

    def give_up_late(self, now_s: float) -> list[tuple[TargetRow, ConsortError]]:
        """Go on without members that took too long. Returns the rows that can't, and why."""
        failed: list[tuple[TargetRow, ConsortError]] = []
        for row in self._rows.values():
            assert row.ensemble is not None
            for replica in row.ensemble.overdue(now_s):
                try:
                    self._drop(row, row.ensemble, replica, "took too long")
                except UnavailableError as error:
                    failed.append((row, error))
        self._hang_up(now_s)
        return failed

    def _hang_up(self, now_s: float) -> None:
        """Close the connections that have been idle for long: to dead members, among others."""
        ensembles = [row.ensemble for row in self._rows.values() if row.ensemble is not None]
        used = {replica for ensemble in ensembles for replica in ensemble.others}
        for replica, used_at_s in list(self._used_at_s.items()):
            if replica in used:
                self._used_at_s[replica] = now_s
            elif now_s - used_at_s > _IDLE_S:  # so what was sent when it was last used has long been heard
                self._link.disconnect(replica)
                del self._used_at_s[replica]

    def leave(self, row: TargetRow) -> None:
        """The row is gone; so are its members' rows, those of members that were dropped included."""
        if self._rows.get(row.key[1]) is row:
            del self._rows[row.key[1]]
        if row.ensemble is not None:
            for replica in filter(None, row.ensemble.replicas):
                self._release(row.key[1], replica)

    def _answered(self, place: _Place, step: int) -> None:
        """The member need not be asked again. step: of the round; 0: it has joined."""
        asked = self._unanswered.get(place)
        if asked is not None and (asked[0].step if isinstance(asked[0], LogitsRequest) else 0) == step:
            del self._unanswered[place]
