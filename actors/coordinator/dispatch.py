"""Assigns requests to replicas, releases them, and moves them off replicas that leave or hang."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import replace

from actors.coordinator.active_request import ActiveRequest
from actors.coordinator.replica_table import Prefix, ReplicaTable
from actors.coordinator.request import Term
from actors.wire.link import Outbox
from actors.wire.messages import AttachDrafter, Cancel, LeaderLost, Member, MemberLost, Remember
from decoding.errors import ConsortError, UnavailableError

_MAX_TARGETS_LOST = 3  # by a request without progress, before it fails
_PROGRESS_TOKENS = 16  # committed since the last loss, to count as progress


class Dispatch:
    """Assignment of one coordinator's requests to replicas."""

    def __init__(
        self,
        replica_table: ReplicaTable,
        outbox: Outbox,
        active: Mapping[int, ActiveRequest],
        fail: Callable[[ActiveRequest, ConsortError], None],
    ) -> None:
        """
        active: requests in progress, by id.
        fail: ends a request that can't go on.
        """
        self._replica_table, self._outbox, self._active, self._fail = replica_table, outbox, active, fail
        self._length_at_loss: dict[int, int] = {}  # tokens of a request when it last lost a target

    def assign(self, active: ActiveRequest) -> None:
        """Assign a target, the members and, if wanted, a drafter. Do nothing if a required model has no replica."""
        request_id, endpoint = active.request.request_id, active.request.endpoint
        prefixes = active.prefixes
        version = None if active.weights is None else active.weights.version
        members = [self._member(term, prefixes) for term in active.request.members]
        if not _have_quorum(active, members):
            return
        active.target = self._replica_table.assign(endpoint.target, request_id, prefixes, version)
        if active.target is None:
            return
        active.members = members
        if active.wants_drafter and endpoint.drafter is not None:
            active.drafter = self._replica_table.assign(endpoint.drafter, request_id)
        self._outbox.put(active.target, active.admit(self._replica_table.address(active.target)))
        self._admit_to_drafter(active)

    def _member(self, term: Term, prefixes: Sequence[Prefix]) -> Member:
        """Return a term with the replica that runs it, if there is one."""
        address = (
            None if term.is_own else self._replica_table.choose(term.name, prefixes if term.prompt is None else ())
        )
        prompt = None if term.prompt is None else list(term.prompt)
        return Member(term.name, address, term.is_own, prompt, term.layers)

    def release(self, active: ActiveRequest, now_s: float) -> None:
        """Cancel the request on its replicas. It then waits for a new target."""
        request_id = active.request.request_id
        if active.target is not None:  # which may be dead, so its members are told, too
            for member in active.members:
                if member.address is not None:
                    self._outbox.put(member.address.name, LeaderLost(request_id, active.target, active.admission))
        for name in (active.target, active.drafter):
            if name is not None:
                self._outbox.put(name, Cancel(request_id))
                self._replica_table.release(name, request_id)
        active.target = active.drafter = None
        active.admission += 1
        active.unassigned_since_s = now_s

    def forget(self, active: ActiveRequest, now_s: float) -> None:
        self.release(active, now_s)
        self._length_at_loss.pop(active.request.request_id, None)

    def replace_target(self, active: ActiveRequest, now_s: float, *, reason: str = "") -> None:
        """Assign a new target. Fail the request instead if it keeps losing targets: it may be the cause.

        reason: the target's own, if it gave one.
        """
        request_id, length = active.request.request_id, len(active.tokens)
        self.release(active, now_s)
        if length - self._length_at_loss.get(request_id, length) >= _PROGRESS_TOKENS:
            active.targets_lost = 0
        self._length_at_loss[request_id] = length
        active.targets_lost += 1
        if active.targets_lost > _MAX_TARGETS_LOST:
            default = f"{active.targets_lost} target replicas were lost while they answered"
            self._fail(active, UnavailableError(reason or default))
        else:
            self.assign(active)

    def _leave(self, active: ActiveRequest, names: Iterable[str], now_s: float) -> None:
        """Assign a new target. That counts as a loss unless all these replicas are only withdrawn."""
        if all(self._replica_table.leaves_alive(name, now_s) for name in names):
            self.move(active, now_s)
        else:
            self.replace_target(active, now_s)

    def move(self, active: ActiveRequest, now_s: float) -> None:
        """Assign a target again, which may be another one."""
        self.release(active, now_s)
        self.assign(active)

    def attach_drafter(self, active: ActiveRequest) -> None:
        """Assign a drafter if the request wants one, has none, and there is one."""
        drafter = active.request.endpoint.drafter
        if active.target is not None and active.drafter is None and drafter is not None and active.wants_drafter:
            self._assign_drafter(active, drafter)

    def _assign_drafter(self, active: ActiveRequest, model: str) -> None:
        active.drafter = self._replica_table.assign(model, active.request.request_id)
        if active.drafter is not None:
            self.announce_drafter(active)
            self._admit_to_drafter(active)

    def detach_drafter(self, active: ActiveRequest) -> None:
        """Release the drafter. The request goes on without, until another one is attached."""
        request_id = active.request.request_id
        if active.drafter is not None:
            self._outbox.put(active.drafter, Cancel(request_id))
            self._replica_table.release(active.drafter, request_id)
        active.drafter = None
        self.announce_drafter(active)

    def announce_drafter(self, active: ActiveRequest) -> None:
        if active.target is not None:
            self._outbox.put(active.target, AttachDrafter(active.request.request_id, active.drafter))

    def replace_replica(self, name: str, request_ids: Iterable[int], now_s: float) -> None:
        """Move requests off a replica that is gone. request_ids: those it was assigned."""
        for request_id in request_ids:
            active = self._active[request_id]
            if active.target == name:
                self.replace_target(active, now_s)
            else:
                self.detach_drafter(active)
        for active in list(self._active.values()):
            if active.target is not None and active.has_member(name) and not self._drop_member(active, name):
                self.replace_target(active, now_s)

    def vacate(self, now_s: float) -> None:
        """Move requests off replicas that leave or hang, if there are others. Detach leaving drafters in any case."""
        for name, request_id in self._replica_table.requests_to_move():
            active = self._active.get(request_id)
            if active is not None:  # it may have failed meanwhile
                self._move(active, name, now_s)
        for active in list(self._active.values()):
            if active.drafter is not None and self._replica_table.is_leaving(active.drafter):
                self.detach_drafter(active)
            if active.target is not None:
                self._update_members(active, now_s)

    def rebalance(self, now_s: float) -> None:
        """Move drafting to less loaded drafters, and waiting requests to targets with free slots."""
        endpoints = {active.request.endpoint.name: active.request.endpoint for active in self._active.values()}
        for model in {endpoint.drafter for endpoint in endpoints.values() if endpoint.drafter is not None}:
            name, count = self._replica_table.find_imbalance(model)
            if count > 0:
                requests = [self._active[request_id] for request_id in self._replica_table.requests_on(name)]
                drafted = [active for active in requests if active.drafter == name]
                for active in sorted(drafted, key=lambda active: len(active.tokens))[:count]:
                    self._move(active, name, now_s)
        for model in {endpoint.target for endpoint in endpoints.values()}:
            for request_id in self._replica_table.waiting_requests_to_move(model):
                active = self._active[request_id]
                if active.request.endpoint.target == model:  # else the model only drafts for it
                    self.move(active, now_s)

    def _move(self, active: ActiveRequest, name: str, now_s: float) -> None:
        request_id, drafter = active.request.request_id, active.request.endpoint.drafter
        if active.target == name:
            self._leave(active, [name], now_s)
        elif active.target is not None and active.drafter == name and drafter is not None:
            self._outbox.put(name, Cancel(request_id))
            self._replica_table.release(name, request_id)
            self._assign_drafter(active, drafter)

    def _update_members(self, active: ActiveRequest, now_s: float) -> None:
        """Start again if a member should move; else drop leaving members where the quorum permits."""
        replicas = [member.address.name for member in active.members if member.address is not None]
        moving = list(filter(self._replica_table.should_vacate, replicas))
        if moving:
            self._leave(active, moving, now_s)
            return
        for name in filter(self._replica_table.is_leaving, replicas):
            self._drop_member(active, name)

    def _drop_member(self, active: ActiveRequest, name: str) -> bool:
        """Go on without a member's replica, if the quorum permits. Returns whether it does."""
        members = [
            replace(member, address=None) if member.address is not None and member.address.name == name else member
            for member in active.members
        ]
        if not _have_quorum(active, members):
            return False
        if active.target is not None:
            self._outbox.put(active.target, MemberLost(active.request.request_id, name))
        active.members = members
        return True

    def remember(self, active: ActiveRequest) -> None:
        """Send a finished text to all replicas of its target that keep a corpus."""
        endpoint, salt = active.request.endpoint, active.salt
        if endpoint.corpus and active.request.prompt_positions is None:  # a shortened prompt is nobody's text
            for address, _ in self._replica_table.reports():
                if address.model == endpoint.target:
                    self._outbox.put(address.name, Remember(active.tokens, salt))

    def _admit_to_drafter(self, active: ActiveRequest) -> None:
        """Admit the request to its drafter, which rests until an Advance if the target wants no drafts now."""
        if active.target is not None and active.drafter is not None:
            admit = active.admit(self._replica_table.address(active.target))
            own = {"adapter": admit.adapter and admit.adapter.drafter, "cache_salt": active.request.cache_salt}
            admit = replace(admit, drafts_only=True, **own)
            wanted = self._replica_table.wants_drafts(active.target)
            self._outbox.put(active.drafter, admit if wanted else replace(admit, draft_length=0))


def _have_quorum(active: ActiveRequest, members: Sequence[Member]) -> bool:
    present = [True, *(member.is_there for member in members)]  # the leader first
    return active.request.ensemble_options.has_quorum(present)
