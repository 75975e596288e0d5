"""The coordinator: admits requests, places them, moves drafts and verdicts, streams commits, survives deaths.

It owns the truth about a request (prompt, parameters, committed tokens). Replicas only continue what it tells them,
so any of them can be replaced at any time. It computes nothing on tensors and knows nothing of HTTP.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from actors.addresses import ReplicaAddress
from actors.link import ConnectingLink, Outbox
from actors.messages import Alive, Cancel, Commit, Drafting, Failed, Lost, Member, Message, Offer, Report
from actors.placement import Placement
from actors.request import ActiveRequest, Delta, Request
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError

_log = logging.getLogger(__name__)
_MAX_TARGETS_LOST = 3  # by one request, before it is given up
_TICK_S = 0.5  # how often deaths and time-outs are looked for


class Coordinator:
    """One coordinator. `submit`, `cancel` and `set_replicas` may be called from any thread; `turn` is its loop."""

    def __init__(
        self,
        link: ConnectingLink,
        *,
        max_requests: int = 256,
        max_silence_s: float = 60.0,
        max_unplaced_s: float = 120.0,
    ) -> None:
        """
        max_requests: how many requests may be in progress or waiting; more are refused.
        max_silence_s: a replica with work that is silent for so long is given up, and its requests placed anew.
        max_unplaced_s: how long a request waits for a target replica before it fails.
        """
        self._link = link
        self._outbox = Outbox(link)
        self._max_requests = max_requests
        self._max_silence_s = max_silence_s
        self._max_unplaced_s = max_unplaced_s
        self._placement = Placement()
        self._active: dict[int, ActiveRequest] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ticked_at_s = 0.0

    # From any thread

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        """Begin a request; `sink` gets its deltas, in order, in the coordinator's thread, and must not block.

        Raises:
            OverloadedError: `max_requests` are in progress.
        """
        if len(self._active) + self._calls.qsize() >= self._max_requests:
            raise OverloadedError(f"{self._max_requests} requests are in progress already.")
        self._call(lambda: self._begin(request, sink))

    def cancel(self, request_id: int) -> None:
        """End a request without another delta; unknown and ended ids are ignored."""
        self._call(lambda: self._end(request_id))

    def set_replicas(self, addresses: Iterable[ReplicaAddress]) -> None:
        """Work with exactly these replicas from now on. Requests on any that is missing are placed anew."""
        wanted = {address.name: address for address in addresses}
        self._call(lambda: self._set_replicas(wanted))

    def models(self) -> set[str]:
        """The models that have a live replica."""
        return self._placement.models()

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        self._link.wake()

    # In the loop's thread

    def turn(self) -> None:
        """Handle what has arrived, in messages and in calls; look for deaths and time-outs now and then."""
        for peer, message in self._link.receive(_TICK_S):
            self._handle(peer, message)
        while not self._calls.empty():
            self._calls.get()()
        now_s = time.monotonic()
        if now_s - self._ticked_at_s >= _TICK_S:
            self._ticked_at_s = now_s
            self._give_up_silent(now_s)
            self._end_late(now_s)
            self._place_waiting(now_s)
            for name in self._placement.busy():
                self._outbox.put(name, Alive())
        self._outbox.flush()

    def _handle(self, peer: str, message: Message) -> None:
        self._placement.heard(peer, time.monotonic(), message if isinstance(message, Report) else None)
        match message:
            case Offer(request_id):
                active = self._active.get(request_id)
                if active is None or active.drafter != peer:
                    self._outbox.put(peer, Cancel(request_id))
                elif active.target is not None:
                    self._outbox.put(active.target, message)
            case Commit(request_id):
                active = self._active.get(request_id)
                if active is not None and active.target == peer:
                    self._commit(active, message)
                else:
                    self._outbox.put(peer, Cancel(request_id))  # it was placed elsewhere, or has ended
            case Failed(request_id, error, field):
                active = self._active.get(request_id)
                if active is not None and active.target == peer:
                    self._fail(
                        active, UnavailableError(error) if field is None else InvalidRequestError(error, field=field)
                    )
                elif active is not None and active.drafter == peer:
                    self._detach_drafter(active)
            case Report():
                self._reconcile(peer, message)
            case _:
                _log.warning("%s sent a %s, which is not for coordinators", peer, type(message).__name__)

    def _commit(self, active: ActiveRequest, message: Commit) -> None:
        """Move the verdict to the drafter and the new text to the client."""
        known = len(active.tokens) - message.base
        if known >= len(message.tokens):
            return  # a duplicate
        if known < 0:
            self._unplace(active)  # something was lost on the way: start again from what is committed
            self._place(active)
            return
        if known > 0:  # partly a duplicate, after a new start
            drafted, accepted = max(0, message.drafted - known), max(0, message.accepted - known)
            message = replace(
                message,
                base=len(active.tokens),
                tokens=message.tokens[known:],
                drafted=drafted,
                accepted=accepted,
                logprobs=message.logprobs and message.logprobs[known:],
            )
        try:
            delta = active.commit(message)
        except Exception as error:  # a fault of a tokenizer or of a user's rule must not end the other requests
            _log.exception("request %d has tokens that can't be read", message.request_id)
            self._fail(active, UnavailableError(f"the answer's tokens can't be read: {error}"))
            return
        if delta.finish is None and active.is_out_of_time(time.monotonic()):
            self._tell(active, delta)
            self._end_with(active, active.end_here())
            return
        if delta.finish is not None:
            self._end(message.request_id)
        elif active.drafter is not None:
            self._outbox.put(active.drafter, message)
        self._tell(active, delta)

    def _tell(self, active: ActiveRequest, delta: Delta) -> None:
        try:
            active.sink(delta)
        except Exception:  # a client's fault must not end the other requests
            _log.exception("request %d ends, because its client failed", active.request.request_id)
            self._end(active.request.request_id)

    def _reconcile(self, name: str, report: Report) -> None:
        """Make what a replica works on what it should: whatever was lost on the way comes right here.

        A request counts as lost by its replica only if two reports in a row lack it: the first may have crossed it.
        """
        strays, lost = self._placement.compare(name, report)
        for request_id in strays:
            self._outbox.put(name, Cancel(request_id))
        for request_id in lost:
            active = self._active[request_id]
            if active.target == name:
                self._lose_target(active)
            else:
                self._detach_drafter(active)

    def _begin(self, request: Request, sink: Callable[[Delta], None]) -> None:
        active = ActiveRequest(request, sink, time.monotonic())
        if request.request_id in self._active:
            error = InvalidRequestError(f"request {request.request_id} is in progress already", field="request_id")
            self._tell(active, Delta("", (), active.statistics, error=error))
            return
        self._active[request.request_id] = active
        self._place(active)

    def _end(self, request_id: int) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            self._unplace(active)

    def _fail(self, active: ActiveRequest, error: ConsortError) -> None:
        self._end_with(active, Delta("", (), active.statistics, error=error))

    def _end_with(self, active: ActiveRequest, last: Delta) -> None:
        self._end(active.request.request_id)
        self._tell(active, last)

    def _lose_target(self, active: ActiveRequest) -> None:
        """The next tick places the request anew, unless it seems to be what ends targets."""
        self._unplace(active)
        active.targets_lost += 1
        if active.targets_lost > _MAX_TARGETS_LOST:
            self._fail(active, UnavailableError(f"{active.targets_lost} target replicas were lost while they answered"))

    def _place(self, active: ActiveRequest) -> None:
        """Give the request a target and, if it wants one, a drafter, which begin to prefill at the same time."""
        request_id, endpoint = active.request.request_id, active.request.endpoint
        members = [Member(model, self._placement.choose(model)) for model in endpoint.members]
        if not active.request.ensemble_options.suffices([True, *(one.address is not None for one in members)]):
            return
        active.target = self._placement.assign(endpoint.target, request_id)
        if active.target is None:
            return
        active.members = members
        if active.wants_drafter and endpoint.drafter is not None:
            active.drafter = self._placement.assign(endpoint.drafter, request_id)
        self._outbox.put(active.target, active.admit())
        self._admit_to_drafter(active)

    def _admit_to_drafter(self, active: ActiveRequest) -> None:
        """The drafter begins at once if drafts are wanted, else when a verdict says so."""
        if active.target is not None and active.drafter is not None:
            admit = active.admit()
            wanted = self._placement.wants_drafts(active.target)
            self._outbox.put(active.drafter, admit if wanted else replace(admit, draft_length=0))

    def _unplace(self, active: ActiveRequest) -> None:
        """Take the request off its replicas."""
        request_id = active.request.request_id
        for name in (active.target, active.drafter):
            if name is not None:
                self._outbox.put(name, Cancel(request_id))
                self._placement.release(name, request_id)
        active.target = active.drafter = None
        active.unplaced_since_s = time.monotonic()

    def _attach_drafter(self, active: ActiveRequest) -> None:
        """Give a placed request that has none a drafter, if there is one."""
        endpoint, request_id = active.request.endpoint, active.request.request_id
        if active.target is None or active.drafter is not None or endpoint.drafter is None or not active.wants_drafter:
            return
        active.drafter = self._placement.assign(endpoint.drafter, request_id)
        if active.drafter is not None:
            self._admit_to_drafter(active)
            self._outbox.put(active.target, Drafting(request_id, attached=True))

    def _detach_drafter(self, active: ActiveRequest) -> None:
        """The drafter no longer works on the request, which goes on without; the next tick looks for another."""
        self._placement.release(active.drafter, active.request.request_id)
        active.drafter = None
        active.drafters_lost += 1
        if active.target is not None:
            self._outbox.put(active.target, Drafting(active.request.request_id, attached=False))

    def _set_replicas(self, wanted: dict[str, ReplicaAddress]) -> None:
        for name in self._placement.names() - set(wanted):
            self._lose(name)
        for name in set(wanted) - self._placement.names():
            self._link.connect(wanted[name])
            self._placement.add(wanted[name], time.monotonic())
        self._place_waiting(time.monotonic())

    def _lose(self, name: str) -> None:
        """A replica is gone. Rows go on without a drafter; requests without a target wait for the next tick."""
        self._link.disconnect(name)
        for active in self._active.values():
            if active.target is not None and any(
                one.address is not None and one.address.name == name for one in active.members
            ):
                self._outbox.put(active.target, Lost(active.request.request_id, name))
        for request_id in self._placement.remove(name):
            active = self._active[request_id]
            if active.target == name:
                self._lose_target(active)
            else:
                self._detach_drafter(active)

    def _give_up_silent(self, now_s: float) -> None:
        for name in self._placement.silent(now_s, self._max_silence_s):
            self._lose(name)

    def _end_late(self, now_s: float) -> None:
        """End what has used up its time."""
        for active in list(self._active.values()):
            if active.is_late(now_s):
                reason = f"timeout_s: the request took longer than {active.request.timeout_s:g} s"
                self._fail(active, DeadlineError(reason))
            elif active.is_out_of_time(now_s):
                self._end_with(active, active.end_here())

    def _place_waiting(self, now_s: float) -> None:
        """Place what has no target, attach drafters where one is missing, and fail what has waited too long."""
        for active in list(self._active.values()):
            if active.target is None:
                self._place(active)
            else:
                self._attach_drafter(active)
            if active.target is None and now_s - active.unplaced_since_s > self._max_unplaced_s:
                model = active.request.endpoint.target
                self._fail(active, UnavailableError(f"no replica of model {model!r} came up in time"))
