"""Between HTTP and the coordinator: prepares requests off the event loop, hands out deltas as they are committed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from actors.wire.addresses import ReplicaAddress
from actors.wire.messages import Report
from decoding.errors import ConsortError, InvalidRequestError, OverloadedError, UnavailableError, UnknownModelError
from deployments.admission.admission import Admission, Limits
from deployments.configuration.key_ring import ANYBODY, ApiKey
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.response_cache import ResponseCache
from deployments.monitoring.metrics import Metrics
from deployments.requests.schema import GenerationRequest
from deployments.requests.token_requests import Detokenization, DetokenizeRequest, Tokenization, TokenizeRequest
from deployments.validation.strict import nearest

if TYPE_CHECKING:
    from deployments.monitoring.tracing import RequestTracer

_Result = TypeVar("_Result")
DeltaBatch = list[tuple[int, Delta]]  # index of the request, its delta


class Service:
    """What the HTTP routes call. One event loop uses it."""

    def __init__(
        self,
        endpoints: Mapping[str, ServedEndpoint],
        coordinator: Coordinator,
        *,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        cached_tokens: int = 0,
        tracer: "RequestTracer | None" = None,
    ) -> None:
        """
        cached_tokens: how much of what was answered is kept, in tokens of prompts and answers.
        tracer: None: requests are not traced.
        """
        self.endpoints = endpoints
        self.metrics = metrics or Metrics()
        self.tracer = tracer
        self._coordinator = coordinator
        self._limits = limits or Limits()
        self._cache = ResponseCache(cached_tokens)
        self._seen: set[str] = set()  # models that have been up
        self.admission = Admission(coordinator, self._limits, self._began, self._slots)
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")

    def ready_models(self) -> set[str]:
        """Configured models that have a live replica."""
        return self._coordinator.models()

    @property
    def malformed(self) -> int:
        """Batches of replicas' messages that made no sense, and were dropped."""
        return self._coordinator.malformed

    def replicas(self) -> list[tuple[ReplicaAddress, Report | None]]:
        """The live replicas, and what each told last."""
        return self._coordinator.reports()

    def _slots(self, model: str) -> int:
        """Of the model's live replicas together."""
        return sum(report.slots for address, report in self.replicas() if report is not None and address.model == model)

    @property
    def max_requests(self) -> int:
        """How many may be in progress or waiting at once."""
        return self._limits.max_requests

    def check_room(self, key: ApiKey, endpoint: str | None = None) -> None:
        """Raises OverloadedError if no request of the key can be taken on; answers that are kept need no room.

        endpoint: the one that it is for, if that is known.
        """
        if self._cache.keeps:
            return
        names = list(self.endpoints) if endpoint is None else [endpoint]
        try:
            self.admission.check_room({self.endpoints[name].endpoint.target for name in names}, key)
        except OverloadedError as error:
            self.metrics.record_refusal(names[0] if len(names) == 1 else "", error)
            raise

    def check_wait(self, served: ServedEndpoint, requests: Sequence[Request], key: ApiKey, priority: int) -> None:
        """Raises OverloadedError if the queue of a model that is asked for whole answers is too long."""
        endpoints = [replace(served.endpoint, target=model, members=()) for model in served.config.models]
        asked = [replace(request, endpoint=endpoint) for request in requests for endpoint in endpoints]
        try:
            self.admission.check(asked, key, priority)
        except OverloadedError as error:
            self.metrics.record_refusal(served.name, error)
            raise

    def endpoint(self, name: str) -> ServedEndpoint:
        """The endpoint that clients call so; raises UnknownModelError if there is none."""
        if name not in self.endpoints:
            suggestion = nearest(name, self.endpoints)
            raise UnknownModelError(f"model: there is no model {name!r}; {suggestion}", field="model")
        return self.endpoints[name]

    async def prepare(self, body: GenerationRequest, *, seed: int) -> list[Request]:
        """For each prompt, one request for each choice.

        Raises:
            InvalidRequestError: the body can't be served as it is.
        """
        endpoint = self.endpoint(body.model)
        count = body.prompt_count * body.choices * endpoint.requests_per_answer
        if count > self._limits.max_requests:
            field, what = ("prompt", "prompts") if body.choices == 1 else ("n", "answers")
            reason = f"{field}: {count} {what} are too many; at most {self._limits.max_requests} are taken at once."
            raise InvalidRequestError(reason, field=field)
        prepare = partial(endpoint.prepare, body, seed=seed)
        requests = await self._in_thread(prepare)
        structure = requests[0].params.structure
        if structure is not None:
            await endpoint.structures.check(structure, field=body.structure_field)
        return requests

    async def tokenize(self, body: TokenizeRequest, *, key: ApiKey = ANYBODY) -> Tokenization:
        """Raises InvalidRequestError if the input can't be tokenized, OverloadedError if there is no room."""
        with self.admission.hold(key):
            return await self._in_thread(partial(self.endpoint(body.model).tokenize, body))

    async def detokenize(self, body: DetokenizeRequest, *, key: ApiKey = ANYBODY) -> Detokenization:
        """Raises InvalidRequestError if an id is not the model's, OverloadedError if there is no room."""
        with self.admission.hold(key):
            return await self._in_thread(partial(self.endpoint(body.model).detokenize, body))

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def run(
        self,
        requests: Sequence[Request],
        *,
        key: ApiKey = ANYBODY,
        priority: int = 0,
        arrived_s: float | None = None,
        admitted: bool = False,
    ) -> AsyncGenerator[DeltaBatch, None]:
        """Deltas of all requests as they come, those that came together in one batch. Leaving early cancels.

        A request that comes several times in a row is a search that has that many answers.

        Args:
            arrived_s: when the client's request came, by the monotonic clock; None: now.
            admitted: they are parts of a request that was taken on already, however long they wait.

        Raises:
            ConsortError: a request was refused, or failed; the others are cancelled.
        """
        deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        repeated = [index > 0 and request is requests[index - 1] for index, request in enumerate(requests)]
        running = {index: request for index, request in enumerate(requests) if not repeated[index]}
        known = {index: answer for index, request in running.items() if (answer := self._cache.get(request))}
        new = {index: request for index, request in running.items() if index not in known}
        kept: dict[int, list[Delta]] = {}  # of answers that are worth keeping
        failure: ConsortError | None = None
        for request in new.values():
            self.metrics.record_arrival(request, arrived_s)
        try:
            self._check_loaded(requests[0].endpoint.target)
            if new and not admitted:
                self.admission.check(list(new.values()), key, priority)
            for index, answer in known.items():
                for delta in answer:
                    deltas.put_nowait((index, delta))
            for index, request in new.items():
                if self._cache.may_hold(request):
                    kept[index] = []
                traced = request if self.tracer is None else self.tracer.start(request)
                self.admission.submit(traced, self._sink(index, request, deltas), key=key, priority=priority)
            while running:
                batch = [await deltas.get()]
                while not deltas.empty():
                    batch.append(deltas.get_nowait())
                for index, delta in batch:
                    if delta.error is not None:
                        raise delta.error
                    if index in kept:
                        kept[index].append(delta)
                    if delta.finish is not None:
                        del running[index]
                        if index in kept:
                            self._cache.put(requests[index], kept[index])
                yield [(index + at, one) for index, delta in batch for at, one in enumerate((delta, *delta.others))]
        except ConsortError as error:
            failure = error
            raise
        finally:
            for request in running.values():
                self.admission.cancel(request.request_id)
                self.metrics.record_failure(request, failure)
                if self.tracer is not None:
                    self.tracer.end(request, None)

    def cache_headers(self, requests: Sequence[Request]) -> dict[str, str]:
        """Whether all answers are there already; nothing where none would be kept."""
        if not any(self._cache.may_hold(request) for request in requests):
            return {}
        hit = all(self._cache.get(request) is not None for request in requests)
        return {"X-Consort-Cache": "hit" if hit else "miss"}

    def _check_loaded(self, model: str) -> None:
        """Raises UnavailableError until the model was up once; if it goes away later, requests wait for it."""
        if model not in self._seen:
            self._seen |= self._coordinator.models()
        if model not in self._seen:
            raise UnavailableError(f"the model {model!r} is loading")

    def _began(self, request: Request) -> None:
        self.metrics.record_start(request)
        if self.tracer is not None:
            self.tracer.mark_admitted(request)

    def _sink(self, index: int, request: Request, deltas: asyncio.Queue[tuple[int, Delta]]) -> Callable[[Delta], None]:
        """What brings a request's deltas from any thread into the event loop."""
        loop = asyncio.get_running_loop()

        def arrive(delta: Delta) -> None:
            deltas.put_nowait((index, delta))
            self.admission.progress(request.request_id, delta.statistics.committed)
            if delta.finish is not None or delta.error is not None:
                self.admission.finished(request.request_id)
                if self.tracer is not None:
                    self.tracer.end(request, delta)
            self.metrics.record_delta(request, delta)

        def sink(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrive, delta)

        return sink
