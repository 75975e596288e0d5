"""The coordinator: admits requests, assigns them to replicas, streams committed text, replaces lost replicas.

It has all that a request's text depends on, so any replica can be replaced at any time.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from actors.coordinator.active_request import ActiveRequest
from actors.coordinator.dispatch import Dispatch
from actors.coordinator.replica_table import HANG_S, ReplicaTable
from actors.coordinator.request import Delta, Request
from actors.coordinator.weights import CurrentWeights
from actors.wire.link import Link, Outbox
from actors.wire.messages import (
    Beams,
    Cancel,
    Commit,
    Failed,
    Heartbeat,
    Message,
    PromptAttention,
    ReplicaAddress,
    Report,
    Weights,
)
from decoding.errors import ConsortError, DeadlineError, InvalidRequestError, OverloadedError, UnavailableError

_log = logging.getLogger(__name__)
_TICK_S = 0.5  # period of checks for lost replicas and time-outs
_HEARTBEAT_PERIOD_S = 2.0


class Coordinator:
    """One coordinator. Any thread may call `submit`, `cancel` and `set_replicas`; `turn` is its loop."""

    def __init__(
        self,
        link: Link,
        *,
        max_requests: int = 256,
        max_silence_s: float = 60.0,
        max_unassigned_s: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        on_step: Callable[[str, int], None] | None = None,
        replaceable: Collection[str] = (),
    ) -> None:
        """
        max_requests: limit of requests in progress or waiting; more are refused.
        max_silence_s: a replica that is silent for longer is given up, and its requests are assigned anew.
        max_unassigned_s: a request that waits longer for a target replica fails.
        clock: seconds; replaced in tests.
        on_step: called in the loop's thread with an endpoint and the tokens that a step of its target took, prompts
            included.
        replaceable: models whose weights may be replaced.
        """
        self._link = link
        self._outbox = Outbox(link)
        self._max_requests = max_requests
        self._max_silence_s = max_silence_s
        self._max_unassigned_s = max_unassigned_s
        self._clock = clock
        self._replica_table = ReplicaTable()
        self._replica_starts: Counter[str] = Counter()
        self._active: dict[int, ActiveRequest] = {}
        self._dispatch = Dispatch(self._replica_table, self._outbox, self._active, self._fail)
        self._weights = CurrentWeights(replaceable, self._replica_table, self._outbox, self._dispatch, self._send_delta)
        self._steps = StepTally(on_step)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ticked_at_s = self._heartbeat_at_s = 0.0

    # From any thread

    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None:
        """Begin a request. `sink` is called with its deltas, in order, in the coordinator's thread; it must not block.

        Raises OverloadedError if `max_requests` are in progress.
        """
        if len(self._active) + self._calls.qsize() >= self._max_requests:
            raise OverloadedError(f"{self._max_requests} requests are in progress already.")
        self._run_in_loop(lambda: self._begin(request, sink))

    def cancel(self, request_id: int, sink: Callable[[Delta], None] | None = None) -> None:
        """End a request without another delta. Unknown ids are ignored.

        sink: end it only if it was submitted with this one. Another caller's may have the same id.
        """
        self._run_in_loop(lambda: self._cancel(request_id, sink))

    def set_replicas(self, addresses: Iterable[ReplicaAddress], healthy: Iterable[str] | None = None) -> None:
        """Work with exactly these replicas from now on. Requests on others move.

        healthy: names of those that have just passed a health check; None: all.
        """
        listed = {address.name: address for address in addresses}
        healthy_names = set(listed if healthy is None else healthy)
        self._run_in_loop(lambda: self._set_replicas(listed, healthy_names))

    def set_weights(self, model: str, weights: Weights, *, recompute: bool = False) -> None:
        """Let requests of a target run with these weights from now on, or a drafter.

        Requests that have begun to write end with the weights that they have. recompute: those that aren't streamed
        begin anew.
        """
        change = partial(self._weights.set, model, weights, recompute=recompute)
        self._run_in_loop(lambda: change(active=list(self._active.values()), now_s=self._clock()))

    def set_rest(self, model: str, rest: int) -> None:
        """Let a model sleep, without weights and pages, once its requests have ended, or wake. Then others are refused.

        rest: as in SetWeights, one more than the present.
        """
        self._run_in_loop(lambda: self._weights.set_rest(model, rest))

    def rest(self, model: str) -> int:
        """Return how often a model was sent to sleep or woken; odd: it is to sleep."""
        return self._weights.rests.get(model, 0)

    def sleeping(self) -> Set[str]:
        """Return the models whose requests are refused until they wake."""
        return self._weights.sleeping()

    def weights(self, model: str) -> Weights | None:
        """Return the weights with which requests to a model begin; None: it has no others."""
        return self._weights.by_model.get(model)

    @property
    def malformed(self) -> int:
        return self._link.malformed

    def replica_starts(self) -> Counter[str]:
        return self._replica_starts.copy()

    def models(self) -> set[str]:
        return self._replica_table.models()

    def reports(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """Return the replicas with their last reports. Replicas report every second."""
        return self._replica_table.reports()

    def _run_in_loop(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        self._link.wake()

    # In the loop's thread

    def turn(self) -> None:
        """Handle messages and calls that have arrived. Every _TICK_S, check replicas and time-outs."""
        began_s = self._clock()
        envelopes = self._link.receive(_TICK_S)
        received_at_s = self._clock()
        self._discount_absence(began_s, received_at_s, usual_s=_TICK_S)
        for peer, message in envelopes:
            self._replica_table.record_message(peer, received_at_s, message if isinstance(message, Report) else None)
            self._handle(peer, message)
        self._steps.flush()
        while not self._calls.empty():
            self._calls.get()()
        now_s = self._clock()
        self._discount_absence(received_at_s, now_s, usual_s=HANG_S / 2)
        if now_s - self._ticked_at_s >= _TICK_S:
            self._ticked_at_s = now_s
            self._check_replicas(now_s)
            self._end_timed_out(now_s)
            self._assign_waiting(now_s)
        self._outbox.flush()

    def _discount_absence(self, since_s: float, now_s: float, *, usual_s: float) -> None:
        """Ignore the replicas' silence while this process was suspended: the step took twice its usual maximum."""
        if now_s - since_s > 2 * usual_s:
            self._replica_table.discount_absence(now_s - since_s)

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case Commit(request_id):
                active = self._active.get(request_id)
                if active is not None and active.target == peer:
                    self._commit(active, message)
                else:
                    self._outbox.put(peer, Cancel(request_id))  # it has moved or ended
            case PromptAttention(request_id, weights):
                active = self._active.get(request_id)
                if active is not None and active.admission == message.admission:
                    active.request.prompt_attention[:] = weights
            case Beams(request_id) | Failed(request_id):
                active = self._active.get(request_id)
                if active is not None and active.admission == message.admission:  # else it has moved since
                    self._handle_end(active, peer, message)
            case Report():
                self._reconcile(peer, message)
            case _:
                _log.warning("%s sent a %s, which is not for coordinators", peer, type(message).__name__)

    def _handle_end(self, active: ActiveRequest, peer: str, message: Beams | Failed) -> None:
        match message:
            case Beams() if active.target == peer:
                with self._fail_if_undecodable(active):
                    self._finish(active, active.finish_search(message))
            case Failed(_, error, field) if active.target == peer:
                self._handle_target_failure(active, error, field)
            case Failed() if active.drafter == peer:
                self._drop_drafter(active)

    def _handle_target_failure(self, active: ActiveRequest, error: str, field: str | None) -> None:
        """Fail the request. With an ensemble try another target first: a member may have been the cause."""
        if field is not None:
            self._fail(active, InvalidRequestError(error, field=field))
        elif any(member.address is not None for member in active.members):
            self._dispatch.replace_target(active, self._clock(), reason=error)
        else:
            self._fail(active, UnavailableError(error))

    def _commit(self, active: ActiveRequest, message: Commit) -> None:
        if message.admission != active.admission or message.base + len(message.tokens) <= len(active.tokens):
            return  # a duplicate, or from before the request moved
        if message.base != len(active.tokens):  # a message was lost
            self._dispatch.release(active, self._clock())
            self._dispatch.assign(active)
            return
        with self._fail_if_undecodable(active):
            is_first = message.base == len(active.request.prompt)
            delta = active.commit(message)
            self._steps.add(active.target or "", active.request, len(delta.tokens), is_first=is_first)
            if delta.finish is None and active.has_reached_max_time(self._clock()):
                self._send_delta(active, delta)
                delta = active.end_now()
            if delta.finish is not None:
                self._end(message.request_id)
                self._dispatch.remember(active)
            self._send_delta(active, delta)

    @contextmanager
    def _fail_if_undecodable(self, active: ActiveRequest) -> Iterator[None]:
        """Fail the request, and no other, if its tokenizer or a user's stopping criterion raises."""
        try:
            yield
        except ConsortError as error:
            self._fail(active, error)
        except Exception as error:
            _log.exception("request %d has tokens that can't be read", active.request.request_id)
            self._fail(active, UnavailableError(f"the request's tokens can't be read: {error!r}"))

    def _send_delta(self, active: ActiveRequest, delta: Delta) -> None:
        try:
            active.sink(delta if active.weights is None else replace(delta, weights=active.weights.version))
        except Exception:  # must not end the other requests
            _log.exception("request %d ends, because its client failed", active.request.request_id)
            self._end(active.request.request_id)

    def _reconcile(self, name: str, report: Report) -> None:
        """Correct what a replica works on after lost messages, which two reports in a row must show."""
        self._weights.reconcile(name, report, self._active, self._clock())
        strays, lost = self._replica_table.find_discrepancies(name, report)
        for request_id in strays:
            self._outbox.put(name, Cancel(request_id))
        for request_id in lost:
            active = self._active[request_id]
            if active.target == name:
                self._dispatch.replace_target(active, self._clock())
            else:
                self._drop_drafter(active)
        reported = [self._active[request_id] for request_id in report.request_ids if request_id in self._active]
        drafters = {active.request.request_id: active.drafter for active in reported if active.target == name}
        for request_id in self._replica_table.find_wrong_drafters(name, drafters, report):
            self._dispatch.announce_drafter(self._active[request_id])

    def _drop_drafter(self, active: ActiveRequest) -> None:
        """Detach a drafter that failed or lost the request. After too many losses it gets no other."""
        active.drafters_lost += 1
        self._dispatch.detach_drafter(active)

    def _begin(self, request: Request, sink: Callable[[Delta], None]) -> None:
        active = ActiveRequest(request, sink, self._clock(), self.weights(request.endpoint.target))
        if request.request_id in self._active:
            error = InvalidRequestError(f"request {request.request_id} is in progress already", field="request_id")
            self._send_delta(active, Delta("", (), active.statistics, error=error))
            return
        refusal = self._weights.refusal(request)
        if refusal is not None:
            self._send_delta(active, Delta("", (), active.statistics, error=refusal))
            return
        self._active[request.request_id] = active
        self._dispatch.assign(active)
        with self._fail_if_undecodable(active):
            active.decode_prompt()

    def _cancel(self, request_id: int, sink: Callable[[Delta], None] | None) -> None:
        active = self._active.get(request_id)
        if active is not None and sink in (None, active.sink):
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        active = self._active.pop(request_id, None)
        if active is not None:
            self._dispatch.forget(active, self._clock())

    def _fail(self, active: ActiveRequest, error: ConsortError) -> None:
        self._finish(active, Delta("", (), active.statistics, error=error))

    def _finish(self, active: ActiveRequest, last: Delta) -> None:
        self._end(active.request.request_id)
        self._send_delta(active, last)

    def _set_replicas(self, listed: dict[str, ReplicaAddress], healthy: set[str]) -> None:
        """Connect to new replicas, and move requests off those that are no longer listed, if others can take them."""
        now_s = self._clock()
        for name in set(listed) - self._replica_table.names():
            self._link.connect(listed[name])
            self._replica_table.add(listed[name], now_s)
            self._replica_starts[listed[name].model] += 1
        self._replica_table.set_listed(listed, healthy, now_s)
        self._dispatch.vacate(now_s)
        self._disconnect_drained()
        self._assign_waiting(now_s)

    def _disconnect_drained(self) -> None:
        for name in self._replica_table.drained():
            if not any(active.has_member(name) for active in self._active.values()):
                self._remove_replica(name)

    def _remove_replica(self, name: str) -> None:
        self._dispatch.replace_replica(name, self._replica_table.remove(name), self._clock())
        self._outbox.flush()  # so that it may still get Cancel
        self._link.disconnect(name)

    def _check_replicas(self, now_s: float) -> None:
        """Give up silent replicas, move requests off those that seem to hang, rebalance, and send heartbeats."""
        self._replica_table.update_suspicions(now_s)
        for name in self._replica_table.timed_out(now_s, self._max_silence_s):
            self._remove_replica(name)
        self._dispatch.vacate(now_s)
        self._dispatch.rebalance(now_s)
        self._disconnect_drained()
        if now_s - self._heartbeat_at_s >= _HEARTBEAT_PERIOD_S:
            self._heartbeat_at_s = now_s
            for name in self._replica_table.names():
                self._outbox.put(name, Heartbeat())

    def _end_timed_out(self, now_s: float) -> None:
        for active in list(self._active.values()):
            if active.has_timed_out(now_s):
                reason = f"timeout_s: the request took longer than {active.request.timeout_s:g} s"
                self._fail(active, DeadlineError(reason))
            elif active.has_reached_max_time(now_s):
                with self._fail_if_undecodable(active):
                    self._finish(active, active.end_now())

    def _assign_waiting(self, now_s: float) -> None:
        """Assign missing targets and drafters. Fail requests that have waited too long."""
        for active in list(self._active.values()):
            if active.target is None:
                self._dispatch.assign(active)
            else:
                self._dispatch.attach_drafter(active)
            if active.target is None and now_s - active.unassigned_since_s > self._max_unassigned_s:
                endpoint, models = active.request.endpoint, self._replica_table.models()
                members = [term.name for term in active.request.members if not term.is_own]
                model = next((member for member in members if member not in models), endpoint.target)
                self._fail(active, UnavailableError(f"no replica of model {model!r} came up in time"))


class StepTally:
    """Tokens that each step computed and wrote, from the commits of a turn. A step commits to a request once."""

    def __init__(self, record: Callable[[str, int], None] | None) -> None:
        """record: called with the endpoint and the tokens of each step, if given."""
        self._record = record
        self._steps: dict[tuple[str, str], dict[int, int]] = {}  # tokens by request, by target and endpoint

    def add(self, target: str, request: Request, tokens: int, *, is_first: bool) -> None:
        """Count the tokens that a step committed to a request. is_first: its first, for which the prompt was read."""
        if self._record is None:
            return
        key = target, request.endpoint.name
        step = self._steps.setdefault(key, {})
        if request.request_id in step:
            self._end(key)
            step = self._steps[key] = {}
        step[request.request_id] = tokens + (len(request.prompt) if is_first else 0)

    def flush(self) -> None:
        for key in list(self._steps):
            self._end(key)

    def _end(self, key: tuple[str, str]) -> None:
        assert self._record is not None
        self._record(key[1], sum(self._steps.pop(key).values()))
