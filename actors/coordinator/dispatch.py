"""Puts requests on replicas, takes them off, and moves them: off replicas that leave or hang, and to new ones.

It tells the replicas, and nobody else: what a request is, and who waits for it, is the coordinator's business.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from actors.coordinator.replica_table import ReplicaTable
from actors.coordinator.request import ActiveRequest
from actors.wire.link import Outbox
from actors.wire.messages import AttachDrafter, Cancel, Member, MemberLost
from decoding.errors import ConsortError, UnavailableError

_MAX_TARGETS_LOST = 3  # by one request without getting further, before it is given up
_FURTHER = 16  # tokens


class Dispatch:
    """Which replicas work on which request. One coordinator's loop uses it."""

    def __init__(
        self,
        placement: ReplicaTable,
        outbox: Outbox,
        active: Mapping[int, ActiveRequest],
        fail: Callable[[ActiveRequest, ConsortError], None],
    ) -> None:
        """
        active: the requests in progress, by id.
        fail: ends one that can't go on.
        """
        self._replica_table, self._outbox, self._active, self._fail = placement, outbox, active, fail
        self._lost_at: dict[int, int] = {}  # how far requests were when they last lost a target, in tokens

    def place(self, active: ActiveRequest) -> None:
        """Give the request a target and, if it wants one, a drafter, which begin to prefill at the same time."""
        request_id, endpoint = active.request.request_id, active.request.endpoint
        members = [Member(model, self._replica_table.choose(model)) for model in endpoint.members]
        if not active.request.ensemble_options.has_quorum([True, *(one.address is not None for one in members)]):
            return
        active.target = self._replica_table.assign(endpoint.target, request_id)
        if active.target is None:
            return
        active.members = members
        if active.wants_drafter and endpoint.drafter is not None:
            active.drafter = self._replica_table.assign(endpoint.drafter, request_id)
        self._outbox.put(active.target, active.admit(self._replica_table.address(active.target)))
        self._admit_to_drafter(active)

    def unplace(self, active: ActiveRequest, now_s: float) -> None:
        """Take the request off its replicas."""
        request_id = active.request.request_id
        for name in (active.target, active.drafter):
            if name is not None:
                self._outbox.put(name, Cancel(request_id))
                self._replica_table.release(name, request_id)
        active.target = active.drafter = None
        active.admission += 1
        active.unplaced_since_s = now_s

    def forget(self, active: ActiveRequest, now_s: float) -> None:
        """The request has ended."""
        self.unplace(active, now_s)
        self._lost_at.pop(active.request.request_id, None)

    def lose_target(self, active: ActiveRequest, now_s: float, *, reason: str = "") -> None:
        """Place the request anew, now or when there is a replica, unless it seems to be what ends targets.

        reason: why it can't stay where it is, if the target said so.
        """
        request_id, known = active.request.request_id, len(active.tokens)
        self.unplace(active, now_s)
        if known - self._lost_at.get(request_id, known) >= _FURTHER:
            active.targets_lost = 0
        self._lost_at[request_id] = known
        active.targets_lost += 1
        if active.targets_lost > _MAX_TARGETS_LOST:
            lost = f"{active.targets_lost} target replicas were lost while they answered"
            self._fail(active, UnavailableError(reason or lost))
        else:
            self.place(active)

    def attach_drafter(self, active: ActiveRequest) -> None:
        """Give a placed request that has none a drafter, if there is one."""
        endpoint, request_id = active.request.endpoint, active.request.request_id
        if active.target is None or active.drafter is not None or endpoint.drafter is None or not active.wants_drafter:
            return
        active.drafter = self._replica_table.assign(endpoint.drafter, request_id)
        if active.drafter is not None:
            self.tell_drafter(active)
            self._admit_to_drafter(active)

    def detach_drafter(self, active: ActiveRequest) -> None:
        """The request goes on without its drafter, until another one is attached."""
        request_id = active.request.request_id
        if active.drafter is not None:
            self._outbox.put(active.drafter, Cancel(request_id))
            self._replica_table.release(active.drafter, request_id)
        active.drafter = None
        self.tell_drafter(active)

    def tell_drafter(self, active: ActiveRequest) -> None:
        """Let the target know which drafter the request has now."""
        if active.target is not None:
            self._outbox.put(active.target, AttachDrafter(active.request.request_id, active.drafter))

    def lose(self, name: str, request_ids: Iterable[int], now_s: float) -> None:
        """A replica is gone, and what was on it goes elsewhere."""
        for request_id in request_ids:
            active = self._active[request_id]
            if active.target == name:
                self.lose_target(active, now_s)
            else:
                self.detach_drafter(active)
        for active in list(self._active.values()):
            if active.target is not None and active.has_member(name):
                self._lose_member(active, name, now_s)

    def relocate(self, now_s: float) -> None:
        """Move what is on replicas that leave or hang, if there are others; drafters that leave are let go at once."""
        for name, request_id in self._replica_table.misplaced():
            active = self._active.get(request_id)
            if active is not None:  # or it failed, because it has lost its target too often
                self._move(active, name, now_s)
        for active in list(self._active.values()):
            if active.drafter is not None and self._replica_table.is_leaving(active.drafter):
                self.detach_drafter(active)
            if active.target is not None:
                self._look_after_members(active, now_s)

    def rebalance(self, now_s: float) -> None:
        """Let drafters that are new, or have less to do, take over from others; and targets what waits elsewhere."""
        endpoints = {active.request.endpoint.name: active.request.endpoint for active in self._active.values()}
        for model in {one.drafter for one in endpoints.values() if one.drafter is not None}:
            name, count = self._replica_table.uneven(model)
            if count > 0:
                actives = [self._active[one] for one in self._replica_table.on(name)]
                for active in sorted((one for one in actives if one.drafter == name), key=_length)[:count]:
                    self._move(active, name, now_s)
        for model in {one.target for one in endpoints.values()}:
            for request_id in self._replica_table.in_line(model):
                active = self._active[request_id]
                if active.request.endpoint.target == model:  # it may only be drafted for there
                    self.unplace(active, now_s)
                    self.place(active)

    def _move(self, active: ActiveRequest, name: str, now_s: float) -> None:
        """To whichever replica suits best now."""
        request_id, drafter = active.request.request_id, active.request.endpoint.drafter
        if active.target == name:
            self.lose_target(active, now_s)
        elif active.target is not None and active.drafter == name and drafter is not None:
            self._outbox.put(name, Cancel(request_id))
            self._replica_table.release(name, request_id)
            active.drafter = self._replica_table.assign(drafter, request_id)
            self.tell_drafter(active)
            self._admit_to_drafter(active)

    def _look_after_members(self, active: ActiveRequest, now_s: float) -> None:
        """Start again with other members where those are better; go on without those that leave where that will do."""
        replicas = [member.address.name for member in active.members if member.address is not None]
        if any(map(self._replica_table.has_better, replicas)):
            self.lose_target(active, now_s)
            return
        for name in filter(self._replica_table.is_leaving, replicas):
            if self._does_without(active, name):
                self._drop_member(active, name)

    def _lose_member(self, active: ActiveRequest, name: str, now_s: float) -> None:
        """A member of the request's ensemble is gone: go on without it where that will do, or start again."""
        if self._does_without(active, name):
            self._drop_member(active, name)
        else:
            self.lose_target(active, now_s)

    def _does_without(self, active: ActiveRequest, name: str) -> bool:
        there = [one.address is not None and one.address.name != name for one in active.members]
        return active.request.ensemble_options.has_quorum([True, *there])

    def _drop_member(self, active: ActiveRequest, name: str) -> None:
        if active.target is not None:
            self._outbox.put(active.target, MemberLost(active.request.request_id, name))
        active.members = [
            Member(one.model, None) if one.address is not None and one.address.name == name else one
            for one in active.members
        ]

    def _admit_to_drafter(self, active: ActiveRequest) -> None:
        """The drafter begins at once if drafts are wanted, else when a verdict says so."""
        if active.target is not None and active.drafter is not None:
            admit = replace(active.admit(self._replica_table.address(active.target)), drafts_only=True)
            wanted = self._replica_table.wants_drafts(active.target)
            self._outbox.put(active.drafter, admit if wanted else replace(admit, draft_length=0))


def _length(active: ActiveRequest) -> int:
    return len(active.tokens)
