"""The Serve application: one deployment per model, and the coordinator's, which answers HTTP.

The only place where Serve's decorators are applied. Torch and transformers are imported in the replicas, so that the
process that builds the application starts at once.
"""

import asyncio
import gc
import os
import sys
from collections.abc import Callable
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
from deployments.scaling.options import ScalingConfig
from deployments.scaling.scaler import autoscaling_config, set_replicas
from deployments.tensor_parallel import start_group
from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from actors.replica.replica import Role
    from actors.wire.addresses import ReplicaAddress
    from actors.wire.messages import Report
    from deployments.discovery import Answers

APP_NAME = "consort"
COORDINATOR = "Coordinator"

_SWITCH_INTERVAL_S = 0.0005  # an event loop and a model loop share the interpreter; the default is 5 ms
_ASK_TIMEOUT_S = 2.0  # a replica that hangs delays what is known of the others, and that should not take them for hung
_DRAIN_S = 25.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as an operator sees it."""

    name: str
    pid: int
    report: "Report"


class ModelReplica:
    """A replica of a model: loads it, and keeps its loop running."""

    def __init__(
        self,
        name: str,
        role: "Role",
        config: ModelConfig,
        targets: dict[str, ModelConfig],
        colocated_drafter: dict[str, ModelConfig],
        leaders: dict[str, ModelConfig],
    ) -> None:
        """
        targets: what a drafter drafts for, by name.
        colocated_drafter: the drafter that runs in a target's replicas, by name; empty if there is none.
        leaders: of ensembles whose text a member reads in other tokens, by name.
        """
        from actors.replica.replica import Replica
        from deployments.monitoring.replica_metrics import ReplicaMetrics
        from deployments.scaling.load_meter import LoadMeter

        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._meter = LoadMeter()
        host, spec, rank = ray.util.get_node_ip_address(), config.spec(name), None
        if spec.tensor_parallel > 1:
            rank, self._attached_drafters = start_group(spec, host, _actor_options(config))
        drafted, followed = ([one.spec(name) for name, one in models.items()] for models in (targets, leaders))
        drafter = next((drafter.spec(name) for name, drafter in colocated_drafter.items()), None)
        self._replica = Replica(role, spec, host, targets=drafted, inside=drafter, leaders=followed, rank=rank)
        self._metrics = ReplicaMetrics(name, role)

    def address(self, coordinator: str | None = None, queued: int = 0) -> "ReplicaAddress":
        """Where coordinators reach it; raises UnavailableError while its loop is stuck.

        queued: requests that the asking coordinator holds back for want of slots of the model.
        """
        if coordinator is not None:
            self._meter.hear(coordinator, queued)
        self._replica.check()
        return self._replica.address

    def status(self) -> ReplicaStatus:
        """Its process and its load."""
        return ReplicaStatus(self._replica.address.name, os.getpid(), self._replica.report())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Its load, for Serve's autoscaler."""
        return self._meter.measure(self._replica.report(), self._replica.times).stats()

    def check_health(self) -> None:
        """Serve's health check; raises UnavailableError if the loop has ended or is stuck."""
        self._replica.check()
        replica = self._replica
        self._metrics.tell(replica.report(), replica.times, replica.malformed)  # as often as that: every two seconds

    def __del__(self) -> None:
        """Serve calls it when it withdraws the replica: what is in hand is handed over first."""
        replica = self.__dict__.pop("_replica", None)  # there is none if the constructor failed
        if replica is not None:
            replica.drain(_DRAIN_S)


class CoordinatorIngress:
    """The coordinator and the HTTP interface, in one process, so that events are sent where commits arrive."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: ServerConfig, handles: dict[str, DeploymentHandle[ModelReplica]]
    ) -> None:
        """handles: of every model's deployment, by model."""
        from actors.coordinator.loop import Coordinator
        from actors.loops.thread import LoopThread
        from actors.wire.zmq_link import ConnectingZmqLink
        from deployments.admission.admission import limits_of
        from deployments.discovery import Discovery
        from deployments.endpoints.endpoint import load_endpoints
        from deployments.endpoints.service import Service
        from deployments.monitoring.tracing_setup import make_tracer

        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        endpoints = load_endpoints(config)
        link = ConnectingZmqLink("coordinator")
        limits = limits_of(config)
        coordinator = Coordinator(link, max_requests=limits.max_requests)
        self._http, self._roles = config.http, config.roles()
        self._service = Service(
            endpoints,
            coordinator,
            limits=limits,
            cached_tokens=config.http.cached_tokens,
            tracer=make_tracer(config.http.tracing),
        )
        self._thread = LoopThread("coordinator", coordinator.turn, link.wake)
        self._thread.start()
        held_back = self._service.admission.held_back
        ask = {
            model: partial(_addresses, handle, link.name, partial(held_back, model))
            for model, handle in handles.items()
        }
        discovery = Discovery(ask, coordinator.set_replicas)
        await discovery.look_at_all()  # Serve sends requests as soon as this returns
        gc.collect()
        gc.freeze()  # what stays for good: a full collection of it would hold up the event loop
        self._discovering = asyncio.create_task(discovery.run())

    def __serve_build_asgi_app__(self) -> FastAPI:
        from deployments.http.gate import log_requests
        from deployments.http.routes import make_api
        from deployments.http.scaling_routes import add_scaling_route

        if self._http.access_log:
            log_requests()
        bound = self._http.max_body_bytes
        api = make_api(self._service, keys=self._http.key_ring(), max_body_bytes=bound, tell_id=False)  # Serve does
        add_scaling_route(api, self._roles, self._scale)
        return api

    async def _scale(self, model: str, count: int) -> None:
        await set_replicas(APP_NAME, deployment_name(model, self._roles[model]), count)

    def check_health(self) -> None:
        """Serve's health check; raises if the coordinator's loop or the discovery of replicas has ended."""
        self._thread.check()
        if self._discovering.done():
            self._discovering.result()

    def __del__(self) -> None:
        """Serve calls it when it withdraws the replica."""
        service = self.__dict__.get("_service")
        if service is not None and service.tracer is not None:
            service.tracer.shut_down()


class BuildArgs(StrictModel):
    """Arguments of the application in a Serve configuration file.

    config: a YAML file's path, or its content.
    require_api_key: whether to refuse a configuration without keys. The environment of `serve deploy` is not seen where
        the application is built, so nobody would notice that a key which was set there does not count.
    """

    config: str | dict[str, Any] | None = None
    require_api_key: bool = True

    def load(self) -> ServerConfig:
        """Raises ConfigError if the configuration can't work."""
        match self.config:
            case None:
                return load_config()
            case str(path):
                return load_config(Path(path))
            case data:
                return parse_config(data, folder=Path.cwd())


def build(args: BuildArgs) -> serve.Application:
    """The application for `serve run deployments.app:build config=...` and serve.yaml.

    Raises:
        ConfigError: the configuration can't work, or has no API key although one is required.
    """
    config = args.load()
    if args.require_api_key and not config.http.api_keys:
        raise ConfigError(
            "http.api_keys: there is no API key. Configure one, or set CONSORT_API_KEY where Ray is started (what is "
            "set for `serve deploy` does not come here); or let anybody ask, by `require_api_key: false` in args"
        )
    return build_application(config, autoscale=True)


def build_application(config: ServerConfig, *, autoscale: bool = False) -> serve.Application:
    """One deployment per model, and the coordinator's over them.

    autoscale: models with `scaling` are Serve's to scale. Only a Serve file can name the policy for that.
    """
    models = {name: _model_deployment(name, role, config, autoscale) for name, role in config.roles().items()}
    deploy = serve.deployment(
        name=COORDINATOR, ray_actor_options={"num_cpus": 0, "runtime_env": _runtime_env(threads=1)}, **_options()
    )
    return deploy(serve.ingress()(CoordinatorIngress)).bind(config, models)


def deployment_name(model: str, role: "Role") -> str:
    """What Serve calls a model's deployment."""
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
    drafted, followed = ({one: config.models[one] for one in models} for models in (targets, leaders))
    return deploy(ModelReplica).bind(name, role, model, drafted, config.colocated_drafter_of(name), followed)


def _actor_options(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_cpus": model.num_cpus,
        "num_gpus": model.num_gpus,
        "resources": model.resources,
        "runtime_env": _runtime_env(model.threads),
    }


def _bundles(model: ModelConfig) -> dict[str, Any]:
    """Room for each rank of a model that is spread over several devices; the replica itself is the first."""
    if model.tensor_parallel == 1:
        return {}
    bundle = {"CPU": model.num_cpus, "GPU": model.num_gpus, **model.resources}
    ranks = [{name: amount for name, amount in bundle.items() if amount}] * model.tensor_parallel
    return {"placement_group_bundles": ranks}


def _scaling(name: str, config: ServerConfig) -> ScalingConfig | None:
    """By what a model scales; None: not at all. Where a drafter scales, its targets do so within their one number: the
    policy sees no load of others."""
    model = config.models[name]
    drafters = [endpoint.drafter for endpoint in config.endpoints.values() if endpoint.target == name]
    if model.scaling is None and any(config.models[drafter].scaling for drafter in drafters if drafter is not None):
        return ScalingConfig(min=model.replicas, max=model.replicas)
    return model.scaling


def _replica_options(
    model: ModelConfig, role: "Role", served: list[str], scaling: ScalingConfig | None
) -> dict[str, Any]:
    """Serve's option for how many replicas a model has. served: the deployments that a drafter drafts for."""
    if scaling is None:
        return {"num_replicas": model.replicas}
    return {"autoscaling_config": autoscaling_config(scaling, scaling.rules(role, served), model.replicas)}


def _options() -> dict[str, Any]:
    """Serve's options that all deployments share. Limits are ours, so Serve's own must never come first."""
    return {
        "max_ongoing_requests": 10_000,
        "health_check_period_s": 2,
        "health_check_timeout_s": 10,
        "max_constructor_retry_count": 2,  # what fails at start is nearly always the configuration
        "graceful_shutdown_wait_loop_s": 1,
        "graceful_shutdown_timeout_s": 30,
        "logging_config": LoggingConfig(enable_access_log=False),
    }


def _runtime_env(threads: int | None) -> dict[str, Any]:
    return {"env_vars": compute_environment(threads)}


async def _addresses(
    handle: DeploymentHandle[ModelReplica], coordinator: str, held_back: Callable[[], int]
) -> "Answers":
    """What the replicas that are up answer; raises as `deployments.discovery.Discovery` says."""
    from actors.wire.addresses import ReplicaAddress
    from deployments.discovery import Answers

    response = handle.broadcast("address", coordinator, held_back())
    try:  # the public `results_async` would lose all answers with the one that is late
        asked = await asyncio.wait_for(response._fetch_replica_results_async(), _ASK_TIMEOUT_S)
    except DeploymentUnavailableError as error:
        raise UnavailableError(str(error)) from error
    waits = (asyncio.wait_for(one.get_async(), _ASK_TIMEOUT_S) for one in asked)
    answers = await asyncio.gather(*waits, return_exceptions=True)
    return Answers(
        [answer for answer in answers if isinstance(answer, ReplicaAddress)],
        complete=not any(isinstance(answer, TimeoutError) for answer in answers),
    )
