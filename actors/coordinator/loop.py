"""The coordinator: admits requests, places them, streams what is committed, survives deaths.

It owns the truth about a request (prompt, parameters, committed tokens). Replicas only continue what it tells them,
so any of them can be replaced at any time. It computes nothing on tensors and knows nothing of HTTP.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from actors.coordinator.dispatch import Dispatch
from actors.coordinator.replica_table import HANG_S, ReplicaTable
from actors.coordinator.request import ActiveRequest, Delta, Request
from actors.wire.addresses import ReplicaAddress
from actors.wire.link import ConnectingLink, Outbox
from actors.wire.messages import Beams, Cancel, Commit, Failed, Heartbeat, Message, Report
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError

_log = logging.getLogger(__name__)
_TICK_S = 0.5  # how often deaths and time-outs are looked for
_ALIVE_S = 2.0  # how often replicas are told that the coordinator lives


class Coordinator:
    """One coordinator. `submit`, `cancel` and `set_replicas` may be called from any thread; `turn` is its loop."""

    def __init__(
        self,
        link: ConnectingLink,
        *,
        max_requests: int = 256,
        max_silence_s: float = 60.0,
        max_unplaced_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        max_requests: how many requests may be in progress or waiting; more are refused.
        max_silence_s: a replica with work that is silent for so long is given up, and its requests placed anew.
        max_unplaced_s: how long a request waits for a target replica before it fails.
        clock: lets tests move the time, in seconds.
        """
        self._link = link
        self._outbox = Outbox(link)
        self._max_requests = max_requests
        self._max_silence_s = max_silence_s
        self._max_unplaced_s = max_unplaced_s
        self._clock = clock
        self._replica_table = ReplicaTable()
        self._active: dict[int, ActiveRequest] = {}
        self._assignment = Dispatch(self._replica_table, self._outbox, self._active, self._fail)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ticked_at_s = self._showed_life_at_s = 0.0

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

    def set_replicas(self, addresses: Iterable[ReplicaAddress], answered: Iterable[str] | None = None) -> None:
        """Work with exactly these replicas from now on. Requests on any that is missing go elsewhere.

        answered: the names of those that have just said that they are well; None: all.
        """
        wanted = {address.name: address for address in addresses}
        alive = set(wanted if answered is None else answered)
        self._call(lambda: self._set_replicas(wanted, alive))

    @property
    def malformed(self) -> int:
        """Batches of replicas' messages that made no sense, and were dropped."""
        return self._link.malformed

    def models(self) -> set[str]:
        """The models that have a live replica."""
        return self._replica_table.models()

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """The live replicas, and what each told last: at most a second ago, unless it hangs."""
        return self._replica_table.reports()

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        self._link.wake()

    # In the loop's thread

    def turn(self) -> None:
        """Handle what has arrived, in messages and in calls; look for deaths and time-outs now and then."""
        began_s = self._clock()
        envelopes = self._link.receive(_TICK_S)
        heard_at_s = self._clock()
        self._pass_over_absence(began_s, heard_at_s, usual_s=_TICK_S)
        for peer, message in envelopes:
            self._replica_table.heard(peer, heard_at_s, message if isinstance(message, Report) else None)
            self._handle(peer, message)
        while not self._calls.empty():
            self._calls.get()()
        now_s = self._clock()
        self._pass_over_absence(heard_at_s, now_s, usual_s=HANG_S / 2)
        if now_s - self._ticked_at_s >= _TICK_S:
            self._ticked_at_s = now_s
            self._look_after_replicas(now_s)
            self._end_late(now_s)
            self._place_waiting(now_s)
        self._outbox.flush()

    def _pass_over_absence(self, since_s: float, now_s: float, *, usual_s: float) -> None:
        """If this took twice as long as ever it may, the process was stopped, or its machine, and heard nobody."""
        if now_s - since_s > 2 * usual_s:
            self._replica_table.pass_over(now_s - since_s)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Commit(request_id):
                active = self._active.get(request_id)
                if active is not None and active.target == peer:
                    self._commit(active, message)
                else:
                    self._outbox.put(peer, Cancel(request_id))  # it was placed elsewhere, or has ended
            case Beams(request_id) | Failed(request_id):
                active = self._active.get(request_id)
                if active is not None and active.admission == message.admission:  # else from before it was moved
                    self._take(active, peer, message)
            case Report():
                self._reconcile(peer, message)
            case _:
                _log.warning("%s sent a %s, which is not for coordinators", peer, type(message).__name__)

    def _take(self, active: ActiveRequest, peer: str, message: Beams | Failed) -> None:
        """The replica `peer` has ended its work on the request, be it with an answer or without."""
        match message:
            case Beams() if active.target == peer:
                with self._reading(active):
                    self._end_with(active, active.found(message))
            case Failed(_, error, field) if active.target == peer:
                self._give_back(active, error, field)
            case Failed() if active.drafter == peer:
                self._lose_drafter(active)

    def _give_back(self, active: ActiveRequest, error: str, field: str | None) -> None:
        """A target can't go on with the request: another may, if a member of an ensemble was to blame."""
        if field is not None:
            self._fail(active, InvalidRequestError(error, field=field))
        elif active.members:
            self._assignment.lose_target(active, self._clock(), reason=error)
        else:
            self._fail(active, UnavailableError(error))

    def _commit(self, active: ActiveRequest, message: Commit) -> None:
        """Add to the text, and tell the client."""
        if message.admission != active.admission or message.base + len(message.tokens) <= len(active.tokens):
            return  # from before the request was moved, or a duplicate
        if message.base != len(active.tokens):  # something was lost on the way
            self._assignment.unplace(active, self._clock())
            self._assignment.place(active)
            return
        with self._reading(active):
            delta = active.commit(message)
            if delta.finish is None and active.is_out_of_time(self._clock()):
                self._tell(active, delta)
                delta = active.end_here()
            if delta.finish is not None:
                self._end(message.request_id)
            self._tell(active, delta)

    @contextmanager
    def _reading(self, active: ActiveRequest) -> Iterator[None]:
        """End the request if its tokens can't be read.

        A fault of a tokenizer or of a user's rule must not end the other requests.
        """
        try:
            yield
        except ConsortError as error:
            self._fail(active, error)
        except Exception as error:
            _log.exception("request %d has tokens that can't be read", active.request.request_id)
            self._fail(active, UnavailableError(f"the request's tokens can't be read: {error!r}"))

    def _tell(self, active: ActiveRequest, delta: Delta) -> None:
        try:
            active.sink(delta)
        except Exception:  # a client's fault must not end the other requests
            _log.exception("request %d ends, because its client failed", active.request.request_id)
            self._end(active.request.request_id)

    def _reconcile(self, name: str, report: Report) -> None:
        """Make what a replica works on what it should: whatever was lost on the way comes right here.

        That something is missing, or wrong, counts once two reports in a row say so: the first may have crossed it.
        """
        strays, lost = self._replica_table.compare(name, report)
        for request_id in strays:
            self._outbox.put(name, Cancel(request_id))
        for request_id in lost:
            active = self._active[request_id]
            if active.target == name:
                self._assignment.lose_target(active, self._clock())
            else:
                self._lose_drafter(active)
        here = [self._active[one] for one in report.request_ids if one in self._active]
        drafters = {one.request.request_id: one.drafter for one in here if one.target == name}
        for request_id in self._replica_table.misled(name, drafters, report):
            self._assignment.tell_drafter(self._active[request_id])

    def _lose_drafter(self, active: ActiveRequest) -> None:
        """The drafter gave the request back, or does not know it; one that keeps doing so is not asked for ever."""
        active.drafters_lost += 1
        self._assignment.detach_drafter(active)

    def _begin(self, request: Request, sink: Callable[[Delta], None]) -> None:
        active = ActiveRequest(request, sink, self._clock())
        if request.request_id in self._active:
            error = InvalidRequestError(f"request {request.request_id} is in progress already", field="request_id")
            self._tell(active, Delta("", (), active.statistics, error=error))
            return
        self._active[request.request_id] = active
        self._assignment.place(active)
        with self._reading(active):
            active.read_prompt()

    def _end(self, request_id: int) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            self._assignment.forget(active, self._clock())

    def _fail(self, active: ActiveRequest, error: ConsortError) -> None:
        self._end_with(active, Delta("", (), active.statistics, error=error))

    def _end_with(self, active: ActiveRequest, last: Delta) -> None:
        self._end(active.request.request_id)
        self._tell(active, last)

    def _set_replicas(self, wanted: dict[str, ReplicaAddress], answered: set[str]) -> None:
        """New ones get work; what is on those that are missing goes elsewhere, if there is such a place."""
        now_s = self._clock()
        for name in set(wanted) - self._replica_table.names():
            self._link.connect(wanted[name])
            self._replica_table.add(wanted[name], now_s)
        self._replica_table.are_up(wanted, answered, now_s)
        self._assignment.relocate(now_s)
        self._drop_left()
        self._place_waiting(now_s)

    def _drop_left(self) -> None:
        """Hang up on replicas that are leaving, once they have said that nothing of ours is there."""
        for name in self._replica_table.left():
            if not any(active.has_member(name) for active in self._active.values()):
                self._lose(name)

    def _lose(self, name: str) -> None:
        """A replica is gone. Rows go on without a drafter; requests without a target are placed anew."""
        self._assignment.lose(name, self._replica_table.remove(name), self._clock())
        self._outbox.flush()  # it may hear yet what it is to forget
        self._link.disconnect(name)

    def _look_after_replicas(self, now_s: float) -> None:
        """Give up those that are silent for too long, take work off those that seem to hang, and share it evenly."""
        self._replica_table.look(now_s)
        for name in self._replica_table.silent(now_s, self._max_silence_s):
            self._lose(name)
        self._assignment.relocate(now_s)
        self._assignment.rebalance(now_s)
        self._drop_left()
        if now_s - self._showed_life_at_s >= _ALIVE_S:
            self._showed_life_at_s = now_s
            for name in self._replica_table.names():
                self._outbox.put(name, Heartbeat())

    def _end_late(self, now_s: float) -> None:
        """End what has used up its time."""
        for active in list(self._active.values()):
            if active.is_late(now_s):
                reason = f"timeout_s: the request took longer than {active.request.timeout_s:g} s"
                self._fail(active, DeadlineError(reason))
            elif active.is_out_of_time(now_s):
                with self._reading(active):
                    self._end_with(active, active.end_here())

    def _place_waiting(self, now_s: float) -> None:
        """Place what has no target, attach drafters where one is missing, and fail what has waited too long."""
        for active in list(self._active.values()):
            if active.target is None:
                self._assignment.place(active)
            else:
                self._assignment.attach_drafter(active)
            if active.target is None and now_s - active.unplaced_since_s > self._max_unplaced_s:
                endpoint, models = active.request.endpoint, self._replica_table.models()
                model = next((one for one in endpoint.members if one not in models), endpoint.target)
                self._fail(active, UnavailableError(f"no replica of model {model!r} came up in time"))
