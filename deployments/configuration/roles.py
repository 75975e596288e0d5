"""The role of each model, which follows from the endpoints that name it. Loads nothing."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from decoding.errors import ConfigError
from deployments.configuration.document import Mistakes
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig
from deployments.fields.strict import nearest

if TYPE_CHECKING:
    from actors.replica.roles import Role

Models = Mapping[str, ModelConfig]  # by name
Endpoints = Mapping[str, EndpointConfig]  # by name

REPLICA_KEYS = {  # that a colocated drafter does not have
    "kv_tokens",
    "memory_gib",
    "num_cpus",
    "num_gpus",
    "replicas",
    "resources",
    "scaling",
    "slots",
    "tensor_parallel",
    "threads",
}


def roles_in(endpoints: Collection[EndpointConfig]) -> dict[str, "Role"]:
    """Return the role of every model that the endpoints name: a drafter that also answers is both."""
    roles: dict[str, Role] = {model: "target" for endpoint in endpoints for model in endpoint.models}
    roles |= {endpoint.compressor: "target" for endpoint in endpoints if endpoint.compressor is not None}
    drafters = dict.fromkeys(endpoint.drafter for endpoint in endpoints if endpoint.drafter is not None)
    return roles | {drafter: "both" if drafter in roles else "drafter" for drafter in drafters}


def missing_models(endpoints: Endpoints, models: Collection[str], mistakes: Mistakes) -> bool:
    """Note the models that endpoints name and nobody has. Returns whether there are none."""
    complete = True
    for name, endpoint in endpoints.items():
        drafter = [] if endpoint.drafter is None else [("drafter", endpoint.drafter)]
        compressor = [] if endpoint.compressor is None else [("compressor", endpoint.compressor)]
        for key, model in (*endpoint.named_models(), *drafter, *compressor):
            if model not in models:
                complete = False
                suggestion = nearest(model, models)
                mistakes.note(f"endpoints.{name}.{key}: there is no model {model!r}; {suggestion}")
    return complete


def check_roles(models: Models, endpoints: Endpoints, mistakes: Mistakes) -> None:
    """Note where endpoints and their models, which are all there, don't fit together."""
    for name, endpoint in endpoints.items():
        if endpoint.drafter == endpoint.target:
            mistakes.note(
                f"endpoints.{name}.drafter: {endpoint.drafter!r} is also the target; name another model or none"
            )
    for name, config in models.items():
        with mistakes.noted():
            _check_colocated(name, config, models, endpoints)
    roles = roles_in(endpoints.values())
    for name, role in roles.items():
        with mistakes.noted():
            _check_adaptation(name, role, models[name])
        if role == "both" and models[name].tensor_parallel > 1:
            mistakes.note(
                f"models.{name}.tensor_parallel: a tensor-parallel model can't be target and drafter at once; "
                "configure it twice, under two names"
            )
    owners: dict[str, str] = {}  # endpoints with heads, by target
    for name in endpoints:
        with mistakes.noted():
            _check_heads(name, models, endpoints, owners)
    _check_adapters(models, endpoints, mistakes)
    for name in sorted(set(models) - set(roles)):
        mistakes.note(f"models.{name}: no endpoint uses it; remove it or name it in an endpoint")


def _check_adaptation(name: str, role: "Role", model: ModelConfig) -> None:
    """Raise ConfigError if a model is to adapt, but is not a drafter alone, on one device, with plain weights."""
    if model.adaptation is None:
        return
    reason = None
    if role != "drafter":
        reason = f"{name!r} answers requests, too, whose text would change; name another drafter"
    elif model.colocated_with is not None:
        reason = f"{name!r} runs in its target's thread, which would wait while weights are loaded; give it replicas"
    elif model.tensor_parallel > 1:
        reason = "a tensor-parallel model can't adapt; set tensor_parallel to 1"
    elif model.quantization is not None:
        reason = f"weights stored as {model.quantization} can't be replaced; remove `quantization`"
    if reason is not None:
        raise ConfigError(f"models.{name}.adaptation: {reason}, or remove the key")


def _check_heads(name: str, models: Models, endpoints: Endpoints, owners: dict[str, str]) -> None:
    """Raise ConfigError unless an endpoint's target can have heads, and has no others.

    owners: the first endpoint with heads of each target, among those before.
    """
    endpoint, key = endpoints[name], f"endpoints.{name}.heads"
    if endpoint.heads is None:
        return
    if endpoint.kind != "speculative":
        raise ConfigError(f"{key}: heads know one model's choices; an endpoint that blends several can't have them")
    if models[endpoint.target].tensor_parallel > 1:
        raise ConfigError(f"{key}: heads need all of {endpoint.target!r} in one process; set its tensor_parallel to 1")
    other = owners.setdefault(endpoint.target, name)
    if endpoints[other].heads != endpoint.heads:
        raise ConfigError(f"{key}: {endpoint.target!r} has other heads in endpoints.{other}; it can load one set")


def parent_of_adapters(target: str, endpoints: Endpoints) -> str | None:
    """Return the endpoint as which requests for a target's adapters are served: the first of that target alone."""
    alone = ("plain", "speculative")
    return next((name for name, config in endpoints.items() if config.target == target and config.kind in alone), None)


def _check_adapters(models: Models, endpoints: Endpoints, mistakes: Mistakes) -> None:
    """Note models with adapters that can't have any, and names that mean two things."""
    owners = dict.fromkeys(endpoints, "an endpoint")
    for name, model in models.items():
        if not model.adapter_slots:
            continue
        key = f"models.{name}.{'adapters' if model.adapters else 'adapters_at_run_time'}"
        if parent_of_adapters(name, endpoints) is None:
            mistakes.note(f"{key}: no endpoint has {name!r} as its `target`; only such endpoints have adapters")
        if model.tensor_parallel > 1:
            mistakes.note(f"{key}: a tensor-parallel model can't have any; set tensor_parallel to 1")
        if model.device == "balanced":
            mistakes.note(f"{key}: a model that is spread over GPUs can't have any; set device to auto")
        for adapter in model.adapters:
            if adapter in owners:
                mistakes.note(f"{key}.{adapter}: {owners[adapter]} has this name, too; take another")
            owners[adapter] = f"models.{name}.adapters"


def _check_colocated(name: str, drafter: ModelConfig, models: Models, endpoints: Endpoints) -> None:
    """Raise ConfigError unless a drafter and the target it is colocated with work for each other only."""
    target, key = drafter.colocated_with, f"models.{name}.colocated_with"
    if target is None:
        return
    if not any(endpoint.drafter == name and endpoint.target == target for endpoint in endpoints.values()):
        raise ConfigError(f"{key}: no endpoint has the target {target!r} and the drafter {name!r}")
    for endpoint_name, endpoint in endpoints.items():
        where = f"endpoints.{endpoint_name}"
        if name in (*endpoint.models, endpoint.compressor):
            raise ConfigError(
                f"{key}: {where} names {name!r} as a model that answers or compresses, which needs its own replicas"
            )
        if endpoint.drafter is not None and (endpoint.drafter == name) != (endpoint.target == target):
            pair = f"{endpoint.drafter!r} with the target {endpoint.target!r}"
            reason = f"{name!r} is colocated with {target!r}, so they work for each other only"
            raise ConfigError(f"{where}.drafter: {pair}: {reason}")
    if own := sorted(drafter.model_fields_set & REPLICA_KEYS):
        raise ConfigError(f"models.{name}.{own[0]}: {name!r} runs in the replicas of {target!r}; remove the key")
