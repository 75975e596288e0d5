"""A target as the leader of ensembles: invites members, requests their logits, collects the replies.

Nothing blocks: while members compute, the leader serves other requests, and requests of other leaders.
"""

import logging
from collections.abc import Callable

import torch
from msgspec.structs import replace

from actors.ensemble.rounds import EnsembleRounds
from actors.loops.row import Row
from actors.verifier.rows import TargetRow
from actors.wire.link import Link
from actors.wire.logits_codec import SharedLogits, offer, unpack
from actors.wire.messages import (
    Cancel,
    Failed,
    Join,
    Joined,
    LogitsReply,
    LogitsRequest,
    LogitsTransport,
    MemberLost,
    Message,
    Report,
)
from actors.wire.shared_memory import SharedOffer
from decoding.errors import ConsortError, UnavailableError
from engine.model.runner import Runner

Send = Callable[[str, Message], None]
MemberMessage = Joined | LogitsReply | MemberLost | Failed
_MemberKey = tuple[int, str]  # request_id, the member's replica

_log = logging.getLogger(__name__)
_RESEND_AFTER = 3  # reports without a reply: one may be on its way already, one be from the turn before
_IDLE_S = 60.0
_PADDING = 1024  # models with one vocabulary may pad it to different sizes


class EnsembleLeader:
    """The ensembles that one target leads. Request ids are unique among all coordinators, so they suffice as keys."""

    def __init__(self, link: Link, send: Send, runner: Runner) -> None:
        self._link, self._send, self._runner = link, send, runner
        self._led: dict[int, tuple[TargetRow, EnsembleRounds]] = {}  # by request_id
        self._used_at_s: dict[str, float] = {}  # by connected replica
        # The message that a member owes a reply, and how many times it has reported since.
        self._unanswered: dict[_MemberKey, tuple[Join | LogitsRequest, int]] = {}
        self._memory: dict[_MemberKey, SharedLogits] = {}

    def lead(self, row: TargetRow, ensemble: EnsembleRounds) -> None:
        self._led[row.key[1]] = row, ensemble

    def follow_slots(self, now_s: float) -> None:
        """Invite the members of rows that got a slot here, and release those of rows that lost theirs.

        A row that has lent its slot keeps its members, because it has it back as soon as it needs it.
        """
        for row, ensemble in self._led.values():
            if row.slot >= 0 and not ensemble.is_invited:
                self._invite(row, ensemble, now_s)
            elif row.slot < 0 and ensemble.is_invited and not row.has_lent:
                self._withdraw(row, ensemble)

    def _invite(self, row: TargetRow, ensemble: EnsembleRounds, now_s: float) -> None:
        ensemble.invite(len(row.tokens), now_s)
        for replica, member in ensemble.others.items():
            address = member.term.address
            assert address is not None
            if replica not in self._used_at_s:
                self._link.connect(address)
            self._used_at_s[replica] = now_s
            join = Join(
                row.key[1],
                row.text_after(member.term.prompt),
                ensemble.leader.term.model,
                row.prompt_length + member.offset(row.prompt_length),
                best_count=ensemble.options.best_count,
                shared=self._share_memory(row, replica) if address.uri else None,
                admission=row.admission,
                cache_salt=row.cache_salt,
                arrived_at_s=row.arrived_at_s,
                invitation=ensemble.invitation,
            )
            self._put((row.key[1], replica), join)

    def _withdraw(self, row: TargetRow, ensemble: EnsembleRounds) -> None:
        ensemble.withdraw()
        for member in ensemble.members:
            self._release((row.key[1], member.replica))

    def _share_memory(self, row: TargetRow, replica: str) -> SharedOffer | None:
        """Offer memory for the logits of a member that may be on the same node."""
        size_bytes = (row.draft_length + 1) * (self._runner.vocab_size + _PADDING) * torch.float32.itemsize
        offered = offer(size_bytes)
        if offered is None:
            return None
        self._memory[row.key[1], replica] = offered[0]
        return offered[1]

    def _put(self, member_key: _MemberKey, message: Join | LogitsRequest) -> None:
        self._unanswered[member_key] = message, 0
        self._send(member_key[1], message)

    def request_logits(self, row: TargetRow, ensemble: EnsembleRounds) -> None:
        """Send the round that has begun to the other members."""
        assert ensemble.round is not None
        draft = ensemble.round.draft
        request = LogitsRequest(
            request_id=row.key[1],
            step=ensemble.round.step,
            base=ensemble.read_length,
            text=row.tokens[ensemble.read_length :],
            tokens=draft.tokens,
            parents=draft.parents,
            transport=LogitsTransport(ensemble.options.member_dtype, ensemble.options.member_top_k),
            admission=row.admission,
            invitation=ensemble.invitation,
        )
        ensemble.round.text_length = len(row.tokens)
        for replica, member in ensemble.others.items():
            offset = member.offset(row.prompt_length)
            self._put((row.key[1], replica), replace(request, base=request.base + offset) if offset else request)

    def reconcile(self, replica: str, report: Report) -> None:
        """Cancel requests that a member should not have, and send again what it seems not to have received."""
        first_waiting = len(report.request_ids) - report.own_waiting  # waiting ones come last
        for index, request_id in enumerate(report.request_ids):
            _, ensemble = self._led.get(request_id, (None, None))
            if ensemble is None or not ensemble.is_invited or replica not in ensemble.others:
                self._send(replica, Cancel(request_id))
            else:
                ensemble.others[replica].waits = index >= first_waiting
        for member_key, (message, reports) in list(self._unanswered.items()):
            if member_key[1] == replica:
                self._unanswered[member_key] = message, reports + 1
                if reports + 1 == _RESEND_AFTER:
                    self._put(member_key, message)

    def receive(self, replica: str, message: MemberMessage, now_s: float) -> tuple[TargetRow, ConsortError] | None:
        """Handle a message from a member, or about one. Returns the row that must fail because of it, and why."""
        if message.request_id not in self._led:
            return None
        row, ensemble = self._led[message.request_id]
        try:
            if isinstance(message, MemberLost):
                self._drop(row, ensemble, message.replica, "is gone")
            elif _is_current(message, row, ensemble) and replica in ensemble.others:
                self._handle(row, ensemble, replica, message, now_s)
        except ConsortError as error:
            return row, error
        except torch.OutOfMemoryError as error:
            _log.warning("no memory for the logits of %s, which are asked for again: %s", replica, error)
        except ValueError as error:
            return row, UnavailableError(f"a member's answer makes no sense: {error}")
        return None

    def _handle(
        self, row: TargetRow, ensemble: EnsembleRounds, replica: str, message: MemberMessage, now_s: float
    ) -> None:
        member_key = row.key[1], replica
        match message:
            case Joined(_, _, max_length):
                offset = ensemble.others[replica].offset(row.prompt_length)
                ensemble.mark_joined(replica, max_length and max_length - offset)
                row.limit_draft()
                self._mark_answered(member_key, step=0)
            case LogitsReply(_, step, packed, best):
                if packed.vocab_size > self._runner.vocab_size + _PADDING:
                    raise ValueError(f"logits of a vocabulary of {packed.vocab_size}")
                logits = unpack(packed, self._runner.device, self._memory.get(member_key))
                ensemble.add_reply(replica, step, logits, best, now_s)
                self._mark_answered(member_key, step)
            case Failed(_, error):
                self._drop(row, ensemble, replica, f"failed: {error}")

    def _drop(self, row: TargetRow, ensemble: EnsembleRounds, replica: str, reason: str) -> None:
        """Go on without a member. Raises UnavailableError if the ensemble can't."""
        if replica in ensemble.others:
            self._release((row.key[1], replica))
            ensemble.drop(replica, reason)

    def _release(self, member_key: _MemberKey) -> None:
        """Cancel the request at a member, and withdraw what it was sent."""
        request_id, replica = member_key
        if replica in self._used_at_s:
            self._send(replica, Cancel(request_id))
        self._unanswered.pop(member_key, None)
        memory = self._memory.pop(member_key, None)
        if memory is not None:
            memory.withdraw()

    def drop_late_members(self, now_s: float) -> list[tuple[TargetRow, ConsortError]]:
        """Go on without members that took too long. Returns the rows that can't, and why."""
        failed: list[tuple[TargetRow, ConsortError]] = []
        for row, ensemble in self._led.values():
            for replica in ensemble.overdue_replicas(now_s):
                try:
                    self._drop(row, ensemble, replica, "took too long")
                except UnavailableError as error:
                    failed.append((row, error))
        self._disconnect_idle(now_s)
        return failed

    def _disconnect_idle(self, now_s: float) -> None:
        used = {replica for _, ensemble in self._led.values() for replica in ensemble.others}
        for replica, used_at_s in list(self._used_at_s.items()):
            if replica in used:
                self._used_at_s[replica] = now_s
            elif now_s - used_at_s > _IDLE_S:  # long enough for the last Cancel to arrive
                self._link.disconnect(replica)
                del self._used_at_s[replica]

    def remove(self, row: Row) -> None:
        """Forget a row, if it leads an ensemble, and cancel it at all members, those that were dropped included."""
        leading, ensemble = self._led.get(row.key[1], (None, None))
        if leading is row and ensemble is not None:
            del self._led[row.key[1]]
            self._withdraw(leading, ensemble)

    def _mark_answered(self, member_key: _MemberKey, step: int) -> None:
        """Stop resending what a member has answered. step: of the round; 0 for a Join."""
        message, _ = self._unanswered.get(member_key, (None, 0))
        if message is not None and (message.step if isinstance(message, LogitsRequest) else 0) == step:
            del self._unanswered[member_key]


def _is_current(message: Joined | LogitsReply | Failed, row: TargetRow, ensemble: EnsembleRounds) -> bool:
    """Whether a member answers the last invitation, as far as it says. An earlier one may have been withdrawn."""
    answers_last = message.invitation in (0, ensemble.invitation)
    return ensemble.is_invited and message.admission == row.admission and answers_last
