"""Prepares requests off the event loop, submits them and yields the events of their answers."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

from actors.coordinator.loop import Coordinator
from actors.coordinator.request import Delta, Request
from actors.wire.messages import ReplicaAddress
from decoding.errors import ConsortError, UnavailableError
from decoding.sampling.params import SamplingParams
from deployments.admission.admission import Admission, Room
from deployments.admission.bounds import Limits
from deployments.admission.key_ledger import SharedLimits
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.configuration.api_keys import ANYBODY, ApiKey
from deployments.endpoints.adapters import RunTimeAdapters
from deployments.endpoints.bounds import check_count
from deployments.endpoints.conversations import Conversations
from deployments.endpoints.delta_queue import DeltaBatch, DeltaQueue, StreamPace
from deployments.endpoints.endpoint import ServedEndpoint, find_endpoint
from deployments.endpoints.panel import PanelComposer, check_panel
from deployments.endpoints.prompt_compression import PromptShortener
from deployments.endpoints.response_cache import ResponseCache
from deployments.endpoints.templates import PromptTemplates
from deployments.endpoints.weights import MakeSpec, RunTimeWeights
from deployments.fields.generation import GenerationRequest
from deployments.fields.prompts import CompressedPrompt, CompressRequest
from deployments.monitoring.metrics import Metrics
from deployments.storage.store import ResponseStore
from deployments.strategies.deliberation import Deliberation
from deployments.strategies.members import Run, for_members, merge_streams
from deployments.strategies.panel import Outcome, Progress
from deployments.strategies.strategy import StrategyOptions
from deployments.strategies.synthesis import Synthesis

if TYPE_CHECKING:
    from deployments.monitoring.tracing import RequestTracer

EventBatch = Sequence[tuple[int, Delta | Progress | Outcome]]  # index of the request, its event
_Result = TypeVar("_Result")


class Service:
    """What the HTTP routes call. Runs in one event loop."""

    def __init__(  # noqa: PLR0913  (options with defaults)
        self,
        endpoints: Mapping[str, ServedEndpoint],
        coordinator: Coordinator,
        *,
        limits: Limits | None = None,
        metrics: Metrics | None = None,
        cached_tokens: int = 0,
        stream_interval_s: float = 0.0,
        templates: Mapping[str, str] = MappingProxyType({}),
        tracer: "RequestTracer | None" = None,
        on_demand: Collection[str] = (),
        shared_limits: SharedLimits | None = None,
        count_coordinators: Callable[[], int] = lambda: 1,
        store: ResponseStore | None = None,
        replaceable: Mapping[str, MakeSpec] = MappingProxyType({}),
    ) -> None:
        """
        cached_tokens: size of the response cache, in tokens of prompts and answers.
        stream_interval_s: the longest time for which a paced stream holds deltas back under load.
        templates: prompt templates in Jinja, by name.
        on_demand: models whose replicas start when requests wait for them.
        shared_limits: limits of keys that hold for other coordinators, too; None: there are no others.
        count_coordinators: those that share the models' replicas, this one included.
        store: of answers to /v1/responses; None: they are not kept.
        replaceable: the models whose weights may be replaced, as in RunTimeWeights.
        """
        self.endpoints = dict(endpoints)
        self.adapters = RunTimeAdapters(self.endpoints, self._try_out)
        self.weights = RunTimeWeights(coordinator, replaceable)
        self.metrics = metrics or Metrics()
        self.conversations = Conversations(store, self.metrics.record_lost_response)
        self.tracer = tracer
        self.templates = PromptTemplates(templates)
        self.coordinator = coordinator
        self.limits = limits or Limits()
        self.cache = ResponseCache(cached_tokens)
        self._pace = StreamPace(stream_interval_s)
        self._on_demand = set(on_demand)
        self._loaded = set(on_demand)  # models that were up at least once, or need not be
        self._count_coordinators = count_coordinators
        self.admission = Admission(
            coordinator, self.limits, self._on_begin, self._count_slots, shared_limits, count_coordinators
        )
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")

    def servable_models(self) -> set[str]:
        """Models that can answer: they don't sleep, and have a live replica or get one when requests wait for it."""
        return self.live_models() - self.coordinator.sleeping()

    def live_models(self) -> set[str]:
        """The same, with those that sleep."""
        return self.coordinator.models() | self._on_demand

    def set_replicas(self, addresses: list[ReplicaAddress], answered: set[str]) -> None:
        """Update the coordinator's replicas, and begin requests for which slots have come since the last call.

        answered: names of those that have just passed a health check.
        """
        self.coordinator.set_replicas(addresses, answered)
        self.admission.begin_waiting()

    def _count_slots(self, model: str) -> int:
        """KV slots of the model's live replicas that other coordinators leave to this one; at least an equal part."""
        replicas = self.coordinator.reports()
        reports = [report for address, report in replicas if report is not None and address.model == model]
        slots = sum(report.slots for report in reports)
        others = sum(report.active + report.waiting - len(report.request_ids) for report in reports)
        return max(slots - others, -(-slots // self._count_coordinators()))

    def enter(self, key: ApiKey, endpoint: str | None = None) -> Callable[[], None]:
        """Count a request that is still to be read. Returns what to call before it is submitted, or when it fails.

        Raises OverloadedError if no request of the key can be accepted, but never while answers are cached.
        """
        if not self.cache.is_enabled:
            self.admission.check_room(self._targets(endpoint), key)
        return self.admission.arrive(key)

    def room(self, key: ApiKey) -> Room | None:
        """Return for how many requests `enter` would say nothing. None: that depends on what they ask for."""
        return None if self.cache.is_enabled else self.admission.room(self._targets(), key)

    def _targets(self, endpoint: str | None = None) -> set[str]:
        names = list(self.endpoints) if endpoint is None else [endpoint]
        known = [self.endpoints[name] for name in names if name in self.endpoints]  # an adapter may be gone
        return {served.endpoint.target for served in known}

    def endpoint(self, name: str) -> ServedEndpoint:
        return find_endpoint(name, self.endpoints)

    async def prepare(self, body: GenerationRequest, *, seed: int, key: ApiKey = ANYBODY) -> list[Request]:
        """Requests of a body: for each prompt, one per choice; raises InvalidRequestError as the endpoint does."""
        endpoint = self.endpoint(body.model)
        check_count(body, endpoint.requests_per_answer, self.limits.max_requests)
        prepare = partial(endpoint.prepare, body, seed=seed, cache_salt=key.cache_salt(body.cache_salt))
        match body:
            case CompletionRequest(prompt_compression=options) | ChatRequest(prompt_compression=options) if options:
                await self._in_thread(partial(self.templates.fill, body))
                ask = partial(self._answers, key, charged=False)  # the shortened request counts
                await PromptShortener(options, endpoint, ask, self._in_thread).shorten_body(body)
                requests = await self._in_thread(partial(prepare, cache_salt=secrets.token_hex(8)))
            case _:
                requests = await self._in_thread(partial(self._fill_and_prepare, body, prepare))
        structure = requests[0].params.structure
        if structure is not None:
            await endpoint.structures.check(structure, field=body.structure_field)
        return requests

    def _fill_and_prepare(self, body: GenerationRequest, prepare: Callable[[], list[Request]]) -> list[Request]:
        self.templates.fill(body)
        if self.endpoint(body.model).panel:
            check_panel(body, body.model)
        return prepare()

    async def compress(self, body: CompressRequest, *, key: ApiKey = ANYBODY) -> CompressedPrompt:
        """Answer /compress. Raises InvalidRequestError for wrong input, OverloadedError if there is no room."""
        endpoint = self.endpoint(body.model)
        return await PromptShortener(body, endpoint, partial(self._answers, key), self._in_thread).compress(body)

    async def _try_out(self, served: ServedEndpoint) -> None:
        """Ask a replica for a token of an endpoint that is not listed yet; raises what goes wrong."""
        request = Request(served.endpoint, [0], SamplingParams(max_tokens=1, temperature=0), speculate=False)
        await self._answers(ANYBODY, [request], charged=False)

    async def _answers(self, key: ApiKey, requests: Sequence[Request], *, charged: bool = True) -> list[list[Delta]]:
        """All deltas of each request. charged: as in `Admission.submit`."""
        answers: list[list[Delta]] = [[] for _ in requests]
        async with aclosing(self.run(requests, key=key, charged=charged)) as batches:
            async for batch in batches:
                for index, delta in batch:
                    answers[index].append(delta)
        return answers

    async def hold(self, key: ApiKey, work: Callable[[], _Result]) -> _Result:
        """Work in the tokenizing thread, as a request in progress. Raises OverloadedError if there is no room."""
        with self.admission.hold(key):
            return await self._in_thread(work)

    async def _in_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    def answer(
        self,
        served: ServedEndpoint,
        body: GenerationRequest,
        requests: Sequence[Request],
        *,
        key: ApiKey,
        priority: int,
        arrived_s: float,
        streamed: bool,
    ) -> AsyncGenerator[EventBatch, None]:
        """Yield deltas of a body's requests as they arrive, or progress and then an outcome for each.

        Closing the generator cancels the requests. Raises as `run` does.

        streamed: whether each batch is sent to the client, so that under load fewer batches are better.
        """
        if served.strategy is None:
            return self.run(requests, key=key, priority=priority, arrived_s=arrived_s, paced=streamed)
        return self._by_strategy(served, served.strategy, body, requests, key, priority)

    async def _by_strategy(
        self,
        served: ServedEndpoint,
        strategy: StrategyOptions,
        body: GenerationRequest,
        requests: Sequence[Request],
        key: ApiKey,
        priority: int,
    ) -> AsyncGenerator[EventBatch, None]:
        """Yield the events of panels that answer, if no model that must answer for one has too long a queue."""
        run: Run = partial(self.run, key=key, priority=priority, admitted=True)
        panels: list[Deliberation | Synthesis] = []
        for index, request in enumerate(requests):
            if strategy.synthesize is None:
                asked = for_members(request, served.config.models)
                panels.append(Deliberation(asked, strategy, run, self.servable_models))
            else:
                prompt = index // body.choices
                composer = PanelComposer(body, prompt, request, served, strategy.synthesize, self._in_thread)
                asked = await composer.member_requests()
                panels.append(Synthesis(asked, strategy, run, self.servable_models, composer))
        self.admission.check([request for panel in panels for request in panel.requests], key, priority)
        async with aclosing(merge_streams([panel.events() for panel in panels])) as events:
            async for index, event in events:
                yield [(index, event)]

    async def run(
        self,
        requests: Sequence[Request],
        *,
        key: ApiKey = ANYBODY,
        priority: int = 0,
        arrived_s: float | None = None,
        admitted: bool = False,
        charged: bool = True,
        paced: bool = False,
    ) -> AsyncGenerator[DeltaBatch, None]:
        """Run requests; yield their deltas in batches as they arrive. Closing the generator cancels them.

        Adjacent identical requests form one beam search with that many answers. Raises ConsortError if a request was
        refused, or failed; the others are cancelled.

        arrived_s: arrival of the client's request, by the monotonic clock; None: now.
        admitted: the requests belong to a request that was accepted already; skip the check of the queue.
        charged: as in `Admission.submit`.
        paced: hold deltas back while there are many other streams, to pass on those of several steps at once.
        """
        deltas = DeltaQueue(self._pace if paced else None)
        running = {
            index: request for index, request in enumerate(requests) if index == 0 or request is not requests[index - 1]
        }
        cached = {index: answer for index, request in running.items() if (answer := self._cached(request))}
        new = {index: request for index, request in running.items() if index not in cached}
        collected = {index: list[Delta]() for index, request in new.items() if self.cache.can_hold(request)}
        failure: ConsortError | None = None
        self.metrics.record_arrival(list(new.values()), arrived_s)
        try:
            self._check_loaded(requests[0].endpoint.target)
            group = list(new.values())
            async with self.admission.reserve(group, key, priority, admitted=admitted, charged=charged):
                for index, request in new.items():
                    traced = request if self.tracer is None else self.tracer.start(request)
                    sink = self._sink(index, request, deltas)
                    self.admission.submit(traced, sink, key=key, priority=priority, charged=charged)
            for index, answer in cached.items():
                for delta in answer:
                    deltas.put(index, delta)
            seen = requests[0].streamed or self._version(requests[0]) is None  # so nothing can be taken back
            held: DeltaBatch = []
            while running:
                for index, delta in await deltas.batch():
                    if delta.restarts:
                        held = [each for each in held if each[0] != index]
                        collected.get(index, []).clear()
                        continue
                    held.append((index, delta))
                    collected.get(index, []).append(delta)
                    if delta.finish is not None:
                        del running[index]
                        if index in collected:
                            self.cache.put(requests[index], collected[index])
                if held and (seen or not running):
                    yield _with_others(held)
                    held = []
        except ConsortError as error:
            failure = error
            raise
        finally:
            deltas.close()
            self._cancel(list(running.values()), failure)

    def _cancel(self, requests: Sequence[Request], failure: ConsortError | None) -> None:
        """Cancel requests that have not ended. failure: why, unless the client left."""
        for request in reversed(requests):  # those that wait first, or they would begin
            self.admission.cancel(request.request_id)
            self.metrics.record_failure(request, failure)
            if self.tracer is not None:
                self.tracer.end(request, None)

    def cache_headers(self, requests: Sequence[Request]) -> dict[str, str]:
        """`X-Consort-Cache`: hit if all answers are cached; no header if none could be."""
        if not any(self.cache.can_hold(request) for request in requests):
            return {}
        hit = all(self.cache.get(request, self._version(request)) is not None for request in requests)
        return {"X-Consort-Cache": "hit" if hit else "miss"}

    def _version(self, request: Request) -> str | None:
        """Return the version of the weights with which the request would begin now, as in Delta."""
        weights = self.coordinator.weights(request.endpoint.target)
        return None if weights is None else weights.version

    def _cached(self, request: Request) -> Sequence[Delta] | None:
        """Deltas of a cached answer, which say that nothing of the prompt was computed; None: not cached."""
        answer = self.cache.get(request, self._version(request))
        if self.cache.can_hold(request):
            self.metrics.record_cache(request, hit=answer is not None)
        if answer is None:
            return None
        length = len(request.prompt)
        return [replace(delta, statistics=replace(delta.statistics, cached=length)) for delta in answer]

    def _check_loaded(self, model: str) -> None:
        """Raise UnavailableError until the model was up once. Later, requests wait for it."""
        if model not in self._loaded:
            self._loaded |= self.coordinator.models()
        if model not in self._loaded:
            raise UnavailableError(f"the model {model!r} is loading")

    def _on_begin(self, request: Request) -> None:
        self.metrics.record_start(request)
        if self.tracer is not None:
            self.tracer.mark_admitted(request)

    def _sink(self, index: int, request: Request, deltas: DeltaQueue) -> Callable[[Delta], None]:
        loop = asyncio.get_running_loop()

        def arrive(delta: Delta) -> None:
            deltas.put(index, delta)
            self.admission.record_progress(request.request_id, delta.statistics.committed)
            if delta.finish is not None or delta.error is not None:
                self.admission.finish(request.request_id)
                if self.tracer is not None:
                    self.tracer.end(request, delta)
            self.metrics.record_delta(request, delta)

        def sink(delta: Delta) -> None:
            loop.call_soon_threadsafe(arrive, delta)

        return sink


def _with_others(batch: DeltaBatch) -> DeltaBatch:
    """Return the deltas, and after each one those of the same search's other answers, whose indices follow."""
    return [(index + offset, answer) for index, delta in batch for offset, answer in enumerate((delta, *delta.others))]
