"""An endpoint with its models in this process: takes and returns what HTTP does. Importing it takes seconds."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, closing, suppress
from functools import partial
from typing import Any

import msgspec
from pydantic import ValidationError

from actors.coordinator.request import Delta, Request
from actors.loops.options import LoopOptions
from actors.replica.in_process import Engine, generate, stream
from actors.replica.replica import ReplicaSpec, load_replica
from actors.replica.roles import Role
from consort.text_model import Body, Route
from decoding.errors import ConfigError, InvalidRequestError, UnavailableError
from deployments.apis.chat.request import ChatRequest
from deployments.apis.chat.writer import ChatWriter
from deployments.apis.choices import AnswerWriter
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.completions.writer import CompletionWriter
from deployments.apis.writer import AnswerIdentity
from deployments.configuration.config import ServerConfig
from deployments.endpoints.endpoint import ServedEndpoint, find_endpoint
from deployments.endpoints.loading import load_endpoints
from deployments.endpoints.templates import PromptTemplates
from deployments.endpoints.weights import RunTimeWeights
from deployments.fields.strict import problem_of
from engine.model.runner import Runner

_CHECK_PERIOD_S = 1.0
_EVENT = "data: {"
_APIS: dict[Route, tuple[type[CompletionRequest | ChatRequest], type[AnswerWriter]]] = {
    "/v1/completions": (CompletionRequest, CompletionWriter),
    "/v1/chat/completions": (ChatRequest, ChatWriter),
}


class _Call:
    """A body of the HTTP interface, and what writes its answer."""

    def __init__(self, requests: Sequence[Request], writer: AnswerWriter) -> None:
        self._requests, self._writer = requests, writer
        # A beam search is one request, repeated for each of its answers.
        self.running = {i: request for i, request in enumerate(requests) if i == 0 or request is not requests[i - 1]}

    def add(self, index: int, delta: Delta) -> Iterator[dict[str, Any]]:
        """Add a delta of the request with that index; yield chunks, if the answer is streamed."""
        for offset, answer in enumerate((delta, *delta.others)):
            for line in self._writer.add(index + offset, answer).split("\n"):  # `splitlines` splits at U+2028, too
                if line.startswith(_EVENT):
                    yield json.loads(line.removeprefix("data: "))

    def whole(self) -> dict[str, Any]:
        """Return the document after the last delta, as a client would read it: some parts are encoded already."""
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self._writer.whole()))
        return document


class InProcessEndpoint:
    """An endpoint whose models are loaded and run here, each in a thread of its own."""

    def __init__(self, config: ServerConfig, name: str) -> None:
        """Start the models; raises ConfigError if the endpoint needs a server, or a model can't be loaded."""
        config = _only(config, name)
        self._name, self._endpoints = name, load_endpoints(config)  # the endpoint's adapters, too
        self._templates = PromptTemplates(config.templates)
        self._preparing = threading.Lock()  # tokenizers work for one thread at a time
        self._tokenizing = ThreadPoolExecutor(
            1, thread_name_prefix="tokenizing"
        )  # for event loops, which must not wait
        loaded = {model: _loaded(_replica_spec(model, role, config)) for model, role in config.roles().items()}
        self._engine = Engine(
            {model: (role, loaded[model][0]) for model, role in config.roles().items()},
            own_options={model: options for model, (_, options) in loaded.items()},
        )
        self._target = config.endpoints[name].target
        self._replaceable = {
            model: partial(config.models[model].spec, model) for model in loaded if loaded[model][1].weights
        }
        self._engine.__enter__()
        self._is_open = True
        self._engine.wait_until_ready()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tokenizing.shutdown(wait=False)
            self._engine.__exit__(None, None, None)

    def _check(self) -> None:
        """Raise UnavailableError if nothing can be answered any more."""
        if not self._is_open:
            raise UnavailableError("this model was closed")
        self._engine.check()

    def load_weights(self, path: str) -> str:
        """Replace the target's weights, and return their version. Errors as in `RunTimeWeights.load`."""
        self._check()
        load = RunTimeWeights(self._engine.coordinator, self._replaceable, self._engine.turnstile.alone).load
        with ThreadPoolExecutor(1) as waiting:  # as below
            return waiting.submit(asyncio.run, load(self._target, path)).result()

    def answer(self, route: Route, bodies: Sequence[Body]) -> list[dict[str, Any]]:
        """Answer bodies together; raises InvalidRequestError before any of them begins."""
        calls = [self._call(route, body) for body in bodies]
        running = [(call, index, request) for call in calls for index, request in call.running.items()]
        answers = generate(self._engine.coordinator, [request for _, _, request in running], self._check)
        for (call, index, _), deltas in zip(running, answers, strict=True):
            for delta in deltas:
                list(call.add(index, delta))
        return [call.whole() for call in calls]

    def stream(self, route: Route, body: Body) -> Iterator[dict[str, Any]]:
        return self._stream(self._call(route, {**body, "stream": True}))

    async def answer_async(self, route: Route, bodies: Sequence[Body]) -> list[dict[str, Any]]:
        """Answer as `answer` does, in an event loop. Cancelling the task cancels the requests."""
        calls = await self._in_thread(partial(self._call, route), bodies)
        async with aclosing(self._deltas(calls)) as deltas:
            async for call, index, delta in deltas:
                list(call.add(index, delta))
        return [call.whole() for call in calls]

    async def stream_async(self, route: Route, body: Body) -> AsyncGenerator[dict[str, Any], None]:
        """Yield chunks as they come. Closing the generator, or cancelling its task, cancels the requests."""
        calls = await self._in_thread(partial(self._call, route), [{**body, "stream": True}])
        async with aclosing(self._deltas(calls)) as deltas:
            async for call, index, delta in deltas:
                for chunk in call.add(index, delta):
                    yield chunk

    async def _in_thread(self, call: Callable[[Body], _Call], bodies: Sequence[Body]) -> list[_Call]:
        self._check()
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, lambda: [*map(call, bodies)])

    async def _deltas(self, calls: Sequence[_Call]) -> AsyncGenerator[tuple[_Call, int, Delta], None]:
        """Run the requests of all calls; yield their deltas as they are committed, each with its call and index."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[tuple[_Call, int, Delta]] = asyncio.Queue()

        def put(call: _Call, index: int, delta: Delta) -> None:
            with suppress(RuntimeError):  # the event loop was closed
                loop.call_soon_threadsafe(deltas.put_nowait, (call, index, delta))

        coordinator = self._engine.coordinator
        running = [(request, partial(put, call, i)) for call in calls for i, request in call.running.items()]
        left = len(running)
        try:
            for request, sink in running:
                coordinator.submit(request, sink)
            while left:
                try:
                    async with asyncio.timeout(_CHECK_PERIOD_S):
                        call, index, delta = await deltas.get()
                except TimeoutError:
                    self._check()
                    continue
                if delta.error is not None:
                    raise delta.error
                left -= delta.finish is not None
                yield call, index, delta
        finally:
            for request, sink in running:
                coordinator.cancel(request.request_id, sink)

    def _call(self, route: Route, fields: Body) -> _Call:
        kind, make_writer = _APIS[route]
        try:
            body = kind.model_validate({"model": self._name, **fields})
        except ValidationError as error:
            field, problem = problem_of(error)
            raise InvalidRequestError(f"{field}: {problem}.", field=field or None) from error
        served = find_endpoint(body.model, self._endpoints)
        seed = body.seed_or_new()
        requests = self._prepare(body, served, seed)
        return _Call(requests, make_writer(body, requests, served.token_decoder, identity=AnswerIdentity.new(seed)))

    def _prepare(self, body: CompletionRequest | ChatRequest, served: ServedEndpoint, seed: int) -> list[Request]:
        self._check()
        if body.prompt_compression is not None:
            reason = "only a server compresses prompts; start `consort serve` and ask it with `Client`"
            raise InvalidRequestError(f"prompt_compression: {reason}.", field="prompt_compression")
        self._templates.fill(body)
        with self._preparing:
            requests = served.prepare(body, seed=seed)
        structure = requests[0].params.structure
        if structure is not None:
            check = served.structures.check(structure, field=body.structure_field)
            with ThreadPoolExecutor(1) as waiting:  # the caller may have an event loop of its own
                waiting.submit(asyncio.run, check).result()
        return requests

    def _stream(self, call: _Call) -> Iterator[dict[str, Any]]:
        if len(call.running) > 1:
            raise InvalidRequestError("n: a stream here has one answer; call `generate` or `chat`.", field="n")
        ((index, request),) = call.running.items()
        with closing(stream(self._engine.coordinator, request, self._check)) as deltas:  # type: ignore[type-var]
            for delta in deltas:
                yield from call.add(index, delta)


def _only(config: ServerConfig, name: str) -> ServerConfig:
    """Return the configuration of one endpoint; raises ConfigError if it needs a server."""
    endpoint = config.endpoints[name].model_copy(update={"compressor": None})
    if endpoint.strategy is not None:
        raise ConfigError(f"endpoints.{name}.strategy: only a server has strategies: `consort serve`")
    used = {*endpoint.models, endpoint.drafter}
    models = {model: settings for model, settings in config.models.items() if model in used}
    for model, settings in models.items():
        if settings.tensor_parallel > 1:
            raise ConfigError(f"models.{model}.tensor_parallel: only a server splits a model: `consort serve`")
    return config.model_copy(update={"models": models, "endpoints": {name: endpoint}})


def _replica_spec(model: str, role: Role, config: ServerConfig) -> ReplicaSpec:
    (endpoint,) = config.endpoints.values()
    leader = config.models[endpoint.target].spec(endpoint.target)
    colocated = config.colocated_drafter_of(model)
    return ReplicaSpec(
        role=role,
        model=config.models[model].spec(model),
        targets=[leader] if model == endpoint.drafter else [],
        leaders=[leader] if model in endpoint.through_text else [],
        colocated=next((drafter.spec(name) for name, drafter in colocated.items()), None),
        heads=config.heads_of(model),
        corpus=config.corpus_of(model),
        weights_at_run_time=config.models[model].weights_at_run_time,
    )


def _loaded(spec: ReplicaSpec) -> tuple[Runner, LoopOptions]:
    # In a thread that ends, because OpenMP keeps workers for every thread that has computed.
    with ThreadPoolExecutor(1, thread_name_prefix=f"loading {spec.model.name}") as loading:
        return loading.submit(load_replica, spec).result()
