"""The Serve application: one deployment per model, and the coordinator's, which serves HTTP.

Serve's decorators are applied here alone. Only constructors import torch, so applications are built fast.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from decoding.errors import ConfigError
from deployments.admission.key_ledger import KeyLedger
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.model import ModelConfig, ScalingConfig
from deployments.configuration.roles import Role
from deployments.fields.strict import StrictModel
from deployments.planning.plan import give_cluster_gpus
from deployments.replicas.coordinator import CoordinatorIngress
from deployments.replicas.environment import (
    COORDINATOR,
    LEDGER,
    LOCAL_COORDINATOR,
    STANDBY_ROUTER,
    actor_options,
    deployment_name,
    runtime_env,
)
from deployments.replicas.model_replica import ModelReplica
from deployments.scaling.controller import autoscaling_config

_STOP_S = 5.0  # for a coordinator without requests to end
_OPTIONS: dict[str, Any] = {  # of all deployments
    "max_ongoing_requests": 10_000,  # out of reach: our own limits apply
    "health_check_period_s": 2,
    "health_check_timeout_s": 10,
    "max_constructor_retry_count": 2,  # failures at start are nearly always the configuration's
    "graceful_shutdown_wait_loop_s": 1,
    "graceful_shutdown_timeout_s": 30,
    "logging_config": LoggingConfig(enable_access_log=False),
}


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
    """Build the application for `serve run deployments.app:build config=...`; raises ConfigError if it is wrong."""
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
        a file has several coordinators that serve, too, whose keys' limits need a ledger; elsewhere they stand by.
    """
    config = give_cluster_gpus(config, ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0)
    roles = config.roles()
    models = {name: _model_deployment(name, role, config, autoscale) for name, role in roles.items()}
    on_demand = {
        name
        for name, model in config.models.items()
        if autoscale and model.scaling is not None and model.scaling.min == 0 and roles.get(name) != "drafter"
    }
    options: dict[str, Any] = {"graceful_shutdown_timeout_s": config.http.drain_s + _STOP_S}  # Serve waits for requests
    if not autoscale:
        options["request_router_config"] = {"request_router_class": STANDBY_ROUTER}
    deploy = _light_deployment(COORDINATOR if autoscale else LOCAL_COORDINATOR, **options)
    keys = [settings.api_key(name) for name, settings in config.http.api_keys.items()]
    limited = [key for key in keys if key.is_limited]
    ledger = _light_deployment(LEDGER)(KeyLedger).bind(limited) if autoscale and limited else None
    return deploy(serve.ingress()(CoordinatorIngress)).bind(config, models, on_demand, ledger)


def _light_deployment(name: str, **options: Any) -> Callable[[Callable[..., Any]], serve.Deployment]:
    """Return the decorator of a deployment that computes little."""
    actor: dict[str, Any] = {"num_cpus": 0, "runtime_env": runtime_env(threads=1)}
    return serve.deployment(name=name, ray_actor_options=actor, **(_OPTIONS | options))


def _model_deployment(name: str, role: Role, config: ServerConfig, autoscale: bool) -> serve.Application:
    model = config.models[name]
    targets = [endpoint.target for endpoint in config.endpoints.values() if endpoint.drafter == name]
    leaders = [endpoint.target for endpoint in config.endpoints.values() if name in endpoint.through_text]
    roles = config.roles()
    scaling = _scaling(name, config) if autoscale else None
    if scaling is None:
        replicas: dict[str, Any] = {"num_replicas": model.replicas}
    else:
        served = [deployment_name(target, roles[target]) for target in targets]
        replicas = {"autoscaling_config": autoscaling_config(scaling, role, served, model.replicas)}
    deploy = serve.deployment(
        name=deployment_name(name, role),
        ray_actor_options=actor_options(model),
        **replicas,
        **_bundles(model),
        **_OPTIONS,
    )
    return deploy(ModelReplica).bind(
        name,
        role,
        model,
        {target: config.models[target] for target in targets},
        config.colocated_drafter_of(name),
        {leader: config.models[leader] for leader in leaders},
        config.heads_of(name),
        config.corpus_of(name),
    )


def _bundles(model: ModelConfig) -> dict[str, Any]:
    """Return a bundle for each rank of a tensor-parallel model; the replica itself is rank 0."""
    if model.tensor_parallel == 1:
        return {}
    bundle = {"CPU": model.num_cpus, "GPU": model.num_gpus or 0, **model.resources}
    ranks = [{name: amount for name, amount in bundle.items() if amount}] * model.tensor_parallel
    return {"placement_group_bundles": ranks}


def _scaling(name: str, config: ServerConfig) -> ScalingConfig | None:
    """Return a model's scaling. Targets of a drafter that scales get fixed bounds: the policy sees only what scales."""
    model = config.models[name]
    drafters = [endpoint.drafter for endpoint in config.endpoints.values() if endpoint.target == name]
    if model.scaling is None and any(config.models[drafter].scaling for drafter in drafters if drafter is not None):
        return ScalingConfig(min=model.replicas, max=model.replicas)
    return model.scaling
