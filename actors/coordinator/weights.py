"""The weights that requests begin with, and what happens to those in progress when others come."""

from collections.abc import Callable, Collection, Mapping, Set

from actors.coordinator.active_request import ActiveRequest
from actors.coordinator.dispatch import Dispatch
from actors.coordinator.replica_table import ReplicaTable
from actors.coordinator.request import Delta, Request
from actors.wire.link import Outbox
from actors.wire.messages import Report, SetWeights, Weights
from decoding.errors import ConsortError, InvalidRequestError, UnavailableError


class CurrentWeights:
    """The current weights of each model that may get others. Replicas that have others are told."""

    def __init__(
        self,
        models: Collection[str],
        replica_table: ReplicaTable,
        outbox: Outbox,
        dispatch: Dispatch,
        send: Callable[[ActiveRequest, Delta], None],
    ) -> None:
        """send: passes a delta on to the client."""
        self.by_model: Mapping[str, Weights] = dict.fromkeys(models, Weights())  # replaced as a whole: threads read it
        self.rests: Mapping[str, int] = dict.fromkeys(models, 0)  # as in SetWeights; replaced as well
        self._replica_table, self._outbox, self._dispatch, self._send = replica_table, outbox, dispatch, send

    def set(
        self, model: str, weights: Weights, active: Collection[ActiveRequest], now_s: float, *, recompute: bool
    ) -> None:
        """Let requests run with new weights: new ones, and those in progress that may.

        These are what has written nothing yet, and with `recompute` texts of which nobody has seen anything, too.
        Weights that are older than the current ones are ignored.
        """
        if weights.order <= self.by_model[model].order:
            return
        self.by_model = {**self.by_model, model: weights}
        self._tell(model)
        for request in active:
            has_begun = len(request.tokens) > len(request.request.prompt)
            may_change = not has_begun or (recompute and not request.request.streamed)
            if request.request.endpoint.target == model and request.weights != weights and may_change:
                self._dispatch.release(request, now_s)
                taken_back = request.restart(weights)
                if taken_back is not None:
                    self._send(request, taken_back)
                self._dispatch.assign(request)

    def refusal(self, request: Request) -> ConsortError | None:
        """Return why a request can't begin."""
        target = request.endpoint.target
        if target in self.sleeping():
            return UnavailableError(f"the model {target!r} sleeps; POST /v1/wake wakes it")
        models = {target, *[term.name for term in request.members if not term.is_own]}
        if len(models) > 1 and models & self.by_model.keys():  # nobody would say which versions wrote the text
            changing = min(models & self.by_model.keys())
            reason = f"formula: {changing!r} has weights_at_run_time, so no formula may join it with other models"
            return InvalidRequestError(reason, field="formula")
        return None

    def sleeping(self) -> Set[str]:
        """Return the models that are to sleep."""
        return {model for model, rest in self.rests.items() if rest % 2}

    def set_rest(self, model: str, rest: int) -> None:
        """Let a model's replicas drop their weights and pages when they have no requests, or load them again.

        It gets no requests while it rests. Numbers below the present one are ignored.
        """
        if rest > self.rests[model]:
            self.rests = {**self.rests, model: rest}
            self._tell(model)

    def _tell(self, model: str) -> None:
        for address, _ in self._replica_table.reports():
            if address.model == model:
                self._outbox.put(address.name, SetWeights(self.by_model[model], self.rests[model]))

    def reconcile(self, name: str, report: Report, active: Mapping[int, ActiveRequest], now_s: float) -> None:
        """Tell a replica what it missed, and move requests whose weights it could not load.

        What it knows beyond that came from another coordinator, or before this one started.
        """
        model = self._replica_table.model(name)
        weights = self.by_model.get(model or "")
        if model is None or weights is None:
            return
        present = report.weights.present
        self.set_rest(model, report.weights.rest)
        if present.order > weights.order:
            self.set(model, present, list(active.values()), now_s, recompute=False)
        elif present.order < weights.order or report.weights.rest < self.rests[model]:
            self._outbox.put(name, SetWeights(weights, self.rests[model]))
        for request_id in report.request_ids:
            request = active.get(request_id)
            if request is not None and request.target == name and request.needs(report.weights.unfit):
                self._dispatch.move(request, now_s)
