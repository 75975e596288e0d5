"""The Serve application: one deployment per model, and the coordinator's, which serves HTTP.

Only this module applies Serve's decorators. Only the replicas import torch and transformers, so that the process that
builds the application starts fast.
"""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from actors.model.thread_environment import compute_environment
from decoding.errors import ConfigError, UnavailableError
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.model import ModelConfig
from deployments.planning.server_plan import give_cluster_gpus
from deployments.scaling.options import ScalingConfig
from deployments.scaling.scaler import autoscaling_config, set_replicas
from deployments.tensor_parallel import start_group
from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from ray.serve.handle import DeploymentBroadcastResponse

    from actors.heads.spec import HeadsSpec
    from actors.replica.roles import Role
    from actors.wire.addresses import ReplicaAddress
    from actors.wire.messages import Report
    from deployments.admission.key_ledger import Account, Settlement
    from deployments.configuration.access.key_ring import ApiKey
    from deployments.discovery import ReplicaAddresses
    from deployments.endpoints.adapter_registry import AdapterChange

    Adapters = Mapping[str, AdapterChange]

APP_NAME = "consort"
COORDINATOR = "Coordinator"
LEDGER = "KeyLedger"

_SWITCH_INTERVAL_S = 0.0005  # an event loop and a model loop share the interpreter; the default is 5 ms
_ADAPTERS_PERIOD_S = 2.0  # of telling new replicas, and of asking them, which adapters were loaded
_ANSWER_TIMEOUT_S = 2.0  # a hanging replica delays the others' answers, which must not make them look hung
_DRAIN_S = 25.0
_STOP_S = 5.0  # for a coordinator without requests to end
_logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica's process and load, for operators."""

    name: str
    pid: int
    report: "Report"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import in the block without garbage collections, which take a sixth of the time; modules are permanent."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """What a replica tells a coordinator. coordinators: those that ask it, this one included."""

    address: "ReplicaAddress"
    coordinators: int


class ModelReplica:
    """A replica of a model: loads it and runs its loop."""

    def __init__(
        self,
        name: str,
        role: "Role",
        config: ModelConfig,
        targets: dict[str, ModelConfig],
        colocated_drafter: dict[str, ModelConfig],
        leaders: dict[str, ModelConfig],
        heads: "HeadsSpec | None" = None,
    ) -> None:
        """
        targets: for a drafter, the models it drafts for, by name.
        colocated_drafter: the drafter that runs in a target's replicas, by name; empty if there is none.
        leaders: for a member with its own vocabulary, the leaders of its ensembles, by name.
        heads: on a target's hidden states; None: it has none.
        """
        with _uncollected():
            from actors.replica.replica import Replica, ReplicaSpec
            from deployments.endpoints.adapter_registry import AdapterRegistry
            from deployments.monitoring.replica_metrics import ReplicaMetrics
            from deployments.scaling.load_meter import LoadMeter

        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._meter = LoadMeter()
        host, spec, rank = ray.util.get_node_ip_address(), config.spec(name), None
        if spec.tensor_parallel > 1:
            rank, self._ranks = start_group(spec, host, _actor_options(config))
        target_specs = [target.spec(target_name) for target_name, target in targets.items()]
        leader_specs = [leader.spec(leader_name) for leader_name, leader in leaders.items()]
        drafter = next((drafter.spec(drafter_name) for drafter_name, drafter in colocated_drafter.items()), None)
        replica = ReplicaSpec(
            role=role,
            model=spec,
            targets=target_specs,
            leaders=leader_specs,
            colocated=drafter,
            heads=heads,
            rank=rank,
            adaptation=None if config.adaptation is None else config.adaptation.options(),
        )
        self._replica = Replica(replica, host)
        gc.collect()
        gc.freeze()  # permanent objects, a model's modules above all: collecting them again would delay a step
        self._metrics = ReplicaMetrics(name, role)
        self._adapters = AdapterRegistry()

    def address(self, coordinator: str | None = None, queued: int = 0) -> ReplicaAnswer:
        """Return the address for coordinators; raises UnavailableError while the loop is stuck.

        queued: requests that the calling coordinator holds back because the model has no free slot.
        """
        if coordinator is not None:
            self._meter.set_queued(coordinator, queued)
        self._replica.check()
        return ReplicaAnswer(self._replica.address, self._meter.count_coordinators())

    def merge_adapters(self, changes: "Adapters") -> "Adapters":
        """Remember for coordinators that start later which adapters were loaded at run time. Returns all changes."""
        self._adapters.merge(changes)
        return self._adapters.changes

    def status(self) -> ReplicaStatus:
        """Return the process and the load."""
        return ReplicaStatus(self._replica.address.name, os.getpid(), self._replica.report())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Serve's autoscaler."""
        return self._meter.measure(self._replica.report(), self._replica.times).stats()

    def check_health(self) -> None:
        """Serve's health check; raises UnavailableError if the loop has ended or is stuck."""
        self._replica.check()
        replica = self._replica
        self._metrics.export(replica.report(), replica.times, replica.malformed)  # Serve calls every two seconds

    def __del__(self) -> None:
        """Hand running requests over before the replica ends. Serve calls this."""
        replica = self.__dict__.pop("_replica", None)  # missing if the constructor failed
        if replica is not None:
            replica.drain(_DRAIN_S)


class Ledger:
    """What all coordinators together use of the limits of API keys, in a process of its own."""

    def __init__(self, keys: "list[ApiKey]") -> None:
        from deployments.admission.key_ledger import KeyLedger

        self._ledger = KeyLedger(keys)

    async def settle(self, account: "Account") -> "Settlement":
        """Answer a coordinator; see `KeyLedger.settle`."""
        return self._ledger.settle(account)


class CoordinatorIngress:
    """The coordinator and the HTTP interface in one process: events are sent where commits arrive."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: ServerConfig,
        handles: dict[str, DeploymentHandle[ModelReplica]],
        on_demand: set[str],
        ledger: DeploymentHandle[Ledger] | None = None,
    ) -> None:
        """
        handles: the handle of every model's deployment, by model.
        on_demand: models that may have no replica until requests wait for one.
        ledger: of keys' limits that hold for several coordinators together; None: each counts for itself.
        """
        with _uncollected():
            from actors.coordinator.loop import Coordinator
            from actors.loops.thread import LoopThread
            from actors.wire.zmq_link import ConnectingZmqLink
            from deployments.admission.admission import limits_of
            from deployments.admission.shared_limits import SharedLimits
            from deployments.discovery import Discovery
            from deployments.endpoints.endpoint import load_endpoints
            from deployments.endpoints.service import Service
            from deployments.http.drain import Drain
            from deployments.monitoring.metrics import Metrics
            from deployments.monitoring.tracing_setup import make_tracer

        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if os.environ.get("RAY_AUTH_MODE") != "token":
            _logger.warning(
                "RAY_AUTH_MODE is not `token`: whoever reaches the ports of this cluster, Serve's gRPC too, may run "
                "any code. Start Ray with RAY_AUTH_MODE=token, or keep others away (docs/security.md)"
            )
        with _uncollected():
            endpoints = load_endpoints(config)
        link = ConnectingZmqLink("coordinator")
        limits = limits_of(config)
        coordinator = Coordinator(link, max_requests=limits.max_requests)
        self._http, self._roles, self._drain = config.http, config.roles(), Drain()
        self._asks: list[_Ask] = []
        shared = None if ledger is None else SharedLimits(link.name, partial(_settle, ledger))
        self._service = Service(
            endpoints,
            coordinator,
            limits=limits,
            metrics=Metrics(link.name),
            cached_tokens=config.http.cached_tokens,
            templates=config.templates,
            tracer=make_tracer(config.http.tracing),
            on_demand=on_demand,
            shared_limits=shared,
            count_coordinators=lambda: max((ask.coordinators for ask in self._asks), default=1),
        )
        self._thread = LoopThread("coordinator", coordinator.turn, link.wake)
        self._thread.start()
        held_back = self._service.admission.count_unserved
        ask = {
            model: _Ask(handle, link.name, partial(held_back, model), wakes=model in on_demand)
            for model, handle in handles.items()
        }
        self._asks += ask.values()
        discovery = Discovery(ask, coordinator.set_replicas)
        await discovery.poll_all()  # Serve sends requests as soon as this returns
        self._adapter_models = {
            model: handle for model, handle in handles.items() if config.models[model].adapters_at_run_time
        }
        await self._sync_adapters()
        gc.collect()
        gc.freeze()  # permanent objects: collecting them again would block the event loop
        self._tasks = [asyncio.create_task(discovery.run()), asyncio.create_task(self._sync_repeatedly())]
        if shared is not None:
            self._tasks.append(asyncio.create_task(shared.run()))

    def __serve_build_asgi_app__(self) -> FastAPI:
        from deployments.http.live_metrics import LiveMetrics
        from deployments.http.middleware.outcomes import log_requests
        from deployments.http.routes import make_api
        from deployments.http.scaling_routes import add_scaling_route

        if self._http.access_log:
            log_requests()
        bound = self._http.max_body_bytes
        keys = self._http.key_ring()
        self._live_metrics = LiveMetrics(self._service)
        api = make_api(
            self._service,
            keys=keys,
            max_body_bytes=bound,
            add_request_id=False,  # Serve does
            cors_origins=self._http.cors_origins,
            allowed_hosts=self._http.host_names,
            ask_others=self._ask_others,
            drain=self._drain,
            share_adapters=self._share_adapters,
        )
        add_scaling_route(api, self._roles, self._scale)
        return api

    async def metrics(self) -> "tuple[str, list[Metric]]":
        """Return this coordinator's name and its metrics, for the one that was asked for /metrics."""
        return self._service.metrics.coordinator, self._live_metrics.own()

    async def _ask_others(self) -> "list[list[Metric]]":
        own = self._service.metrics.coordinator
        answers, _ = await _answers(serve.get_deployment_handle(COORDINATOR, APP_NAME).broadcast("metrics"))
        return [families for name, families in answers if name != own]

    async def merge_adapters(self, changes: "Adapters") -> "Adapters":
        """Take over which adapters were loaded at another coordinator. Returns all changes that are known here."""
        self._service.adapters.merge(changes)
        return self._service.adapters.changes

    async def _share_adapters(self) -> None:
        """Tell the other coordinators at once, and the replicas, which remember."""
        coordinators = serve.get_deployment_handle(COORDINATOR, APP_NAME)
        await asyncio.gather(self._exchange_adapters(coordinators), self._sync_adapters())

    async def _sync_adapters(self) -> None:
        """Learn from replicas what other coordinators have loaded, and tell replicas that are new."""
        await asyncio.gather(*map(self._exchange_adapters, self._adapter_models.values()))

    async def _exchange_adapters(self, handle: DeploymentHandle[Any]) -> None:
        adapters = self._service.adapters
        try:
            answers, _ = await _answers(handle.broadcast("merge_adapters", adapters.changes))
        except DeploymentUnavailableError:  # it has no replica yet
            return
        except Exception:  # an error of the control plane; the next exchange comes soon
            _logger.warning("could not exchange adapters", exc_info=True)
            return
        for changes in answers:
            adapters.merge(changes)

    async def _sync_repeatedly(self) -> None:
        while self._adapter_models:
            await asyncio.sleep(_ADAPTERS_PERIOD_S)
            await self._sync_adapters()

    async def drain(self) -> int:
        """Take no more requests, and let those in progress end. Returns how many have not ended in time."""
        return await self._drain.run(self._http.drain_s)

    async def _scale(self, model: str, count: int) -> None:
        await set_replicas(APP_NAME, deployment_name(model, self._roles[model]), count)

    def check_health(self) -> None:
        """Serve's health check; raises if the coordinator's loop or a task that should run for ever has ended."""
        self._thread.check()
        for task in self._tasks:
            if task.done():
                task.result()

    def __del__(self) -> None:
        """Send the spans that are left. Serve calls this when the replica ends."""
        service = self.__dict__.get("_service")
        if service is not None and service.tracer is not None:
            service.tracer.shut_down()


class BuildArgs(StrictModel):
    """Arguments of the application in a Serve configuration file.

    config: the path of a YAML file, or its content.
    require_api_key: whether to refuse a configuration without keys. The application is built without the environment of
        `serve deploy`, so a key set there would silently be ignored.
    """

    config: str | dict[str, Any] | None = None
    require_api_key: bool = True

    def load(self) -> ServerConfig:
        """Read the configuration; raises ConfigError if it is wrong."""
        match self.config:
            case None:
                return load_config()
            case str(path):
                return load_config(Path(path))
            case data:
                return parse_config(data, folder=Path.cwd())


def build(args: BuildArgs) -> serve.Application:
    """Build the application for `serve run deployments.app:build config=...` and serve.yaml.

    Raises:
        ConfigError: the configuration is wrong, or has no API key although one is required.
    """
    config = args.load()
    if args.require_api_key and not config.http.api_keys:
        raise ConfigError(
            "http.api_keys: there is no API key. Configure one, or set CONSORT_API_KEY where Ray is started (what is "
            "set for `serve deploy` does not come here); or serve anybody, by `require_api_key: false` in args"
        )
    return build_application(config, autoscale=True)


def build_application(config: ServerConfig, *, autoscale: bool = False) -> serve.Application:
    """Build a deployment per model, and the coordinator's.

    autoscale: let Serve scale models with `scaling`. That needs the policy, which only a Serve file can name. Only such
        a file has several coordinators, too, whose keys' limits need a ledger.
    """
    config = give_cluster_gpus(config, ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0)
    models = {name: _model_deployment(name, role, config, autoscale) for name, role in config.roles().items()}
    options = _options() | {
        "graceful_shutdown_timeout_s": config.http.drain_s + _STOP_S
    }  # Serve waits for its requests
    deploy = serve.deployment(
        name=COORDINATOR, ray_actor_options={"num_cpus": 0, "runtime_env": _runtime_env(threads=1)}, **options
    )
    roles = config.roles()
    on_demand = {
        name
        for name, model in config.models.items()
        if autoscale and model.scaling is not None and model.scaling.min == 0 and roles.get(name) != "drafter"
    }
    ledger = _ledger(config) if autoscale else None
    return deploy(serve.ingress()(CoordinatorIngress)).bind(config, models, on_demand, ledger)


def _ledger(config: ServerConfig) -> serve.Application | None:
    """Return the deployment of the ledger; None if no key has limits."""
    keys = [key for name, config_ in config.http.api_keys.items() if (key := config_.api_key(name)).is_limited]
    if not keys:
        return None
    deploy = serve.deployment(
        name=LEDGER, ray_actor_options={"num_cpus": 0, "runtime_env": _runtime_env(threads=1)}, **_options()
    )
    return deploy(Ledger).bind(keys)


def deployment_name(model: str, role: "Role") -> str:
    """Return the name of a model's deployment in Serve."""
    return f"{role.capitalize()}-{model}"


def _model_deployment(name: str, role: "Role", config: ServerConfig, autoscale: bool) -> serve.Application:
    model = config.models[name]
    targets = [endpoint.target for endpoint in config.endpoints.values() if endpoint.drafter == name]
    leaders = [endpoint.target for endpoint in config.endpoints.values() if name in endpoint.through_text]
    roles = config.roles()
    served = [deployment_name(target, roles[target]) for target in targets]
    deploy = serve.deployment(
        name=deployment_name(name, role),
        ray_actor_options=_actor_options(model),
        **_replica_options(model, role, served, _scaling(name, config) if autoscale else None),
        **_bundles(model),
        **_options(),
    )
    return deploy(ModelReplica).bind(
        name,
        role,
        model,
        {target: config.models[target] for target in targets},
        config.colocated_drafter_of(name),
        {leader: config.models[leader] for leader in leaders},
        config.heads_of(name),
    )


def _actor_options(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_cpus": model.num_cpus,
        "num_gpus": model.num_gpus or 0,
        "resources": model.resources,
        "runtime_env": _runtime_env(model.threads),
    }


def _bundles(model: ModelConfig) -> dict[str, Any]:
    """Return a bundle for each rank of a tensor-parallel model; the replica itself is rank 0."""
    if model.tensor_parallel == 1:
        return {}
    bundle = {"CPU": model.num_cpus, "GPU": model.num_gpus or 0, **model.resources}
    ranks = [{name: amount for name, amount in bundle.items() if amount}] * model.tensor_parallel
    return {"placement_group_bundles": ranks}


def _scaling(name: str, config: ServerConfig) -> ScalingConfig | None:
    """Return a model's scaling, or None.

    If a drafter scales, its targets get fixed bounds: the policy sees only the load of deployments that scale.
    """
    model = config.models[name]
    drafters = [endpoint.drafter for endpoint in config.endpoints.values() if endpoint.target == name]
    if model.scaling is None and any(config.models[drafter].scaling for drafter in drafters if drafter is not None):
        return ScalingConfig(min=model.replicas, max=model.replicas)
    return model.scaling


def _replica_options(
    model: ModelConfig, role: "Role", served: list[str], scaling: ScalingConfig | None
) -> dict[str, Any]:
    """Return Serve's option for the number of replicas. served: the deployments that a drafter drafts for."""
    if scaling is None:
        return {"num_replicas": model.replicas}
    return {"autoscaling_config": autoscaling_config(scaling, scaling.rules(role, served), model.replicas)}


def _options() -> dict[str, Any]:
    """Return the options that all deployments share. Our own limits apply, so Serve's must be out of reach."""
    return {
        "max_ongoing_requests": 10_000,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "max_constructor_retry_count": 2,  # failures at start are nearly always the configuration's
        "graceful_shutdown_wait_loop_s": 1,
        "graceful_shutdown_timeout_s": 30,
        "logging_config": LoggingConfig(enable_access_log=False),
    }


def _runtime_env(threads: int | None) -> dict[str, Any]:
    return {"env_vars": compute_environment(threads)}


class _Ask:
    """Asks a model's live replicas for their addresses. If there is none and requests wait, it lets Serve start one."""

    def __init__(
        self,
        handle: DeploymentHandle[ModelReplica],
        coordinator: str,
        held_back: Callable[[], int],
        *,
        wakes: bool,
    ) -> None:
        """wakes: whether the model scales from 0."""
        self._handle, self._coordinator, self._held_back, self._wakes = handle, coordinator, held_back, wakes
        self.coordinators = 1  # that ask this model's replicas
        self._call: Any = None  # a response of Serve's that waits for the first replica

    async def __call__(self) -> "ReplicaAddresses":
        """Return the addresses; raises what `deployments.discovery.Discovery` expects."""
        from deployments.discovery import ReplicaAddresses

        held_back = self._held_back()
        try:
            answers, complete = await _answers(self._handle.broadcast("address", self._coordinator, held_back))
        except DeploymentUnavailableError as error:
            self._wake(held_back)
            raise UnavailableError(str(error)) from error
        self._call = None
        answers = [answer for answer in answers if isinstance(answer, ReplicaAnswer)]
        self.coordinators = max((answer.coordinators for answer in answers), default=1)
        return ReplicaAddresses([answer.address for answer in answers], complete=complete)

    def _wake(self, held_back: int) -> None:
        """Make a call, which Serve's autoscaler sees waiting, or take it back."""
        if not self._wakes:
            return
        if held_back and self._call is None:
            self._call = self._handle.address.remote(self._coordinator, held_back)
        elif not held_back and self._call is not None:
            self._call.cancel()
            self._call = None


async def _settle(ledger: DeploymentHandle[Ledger], account: "Account") -> "Settlement":
    settlement: Settlement = await ledger.settle.remote(account)
    return settlement


async def _answers(response: "DeploymentBroadcastResponse") -> tuple[list[Any], bool]:
    """Return the replicas' answers, and whether all came in time. Those that raised an error are left out."""
    # The public `results_async` loses all answers if one is late.
    results = await asyncio.wait_for(response._fetch_replica_results_async(), _ANSWER_TIMEOUT_S)
    waits = (asyncio.wait_for(result.get_async(), _ANSWER_TIMEOUT_S) for result in results)
    answers = await asyncio.gather(*waits, return_exceptions=True)
    complete = not any(isinstance(answer, TimeoutError) for answer in answers)
    return [answer for answer in answers if not isinstance(answer, BaseException)], complete
