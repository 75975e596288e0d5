"""The role of each model, which follows from the endpoints that name it, and whether models and endpoints fit."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig
from deployments.fields.strict import nearest
from engine.loading.gguf.files import is_gguf

Role = Literal["target", "drafter", "both"]  # as in `actors.replica.roles`, which imports torch
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


def roles_in(endpoints: Collection[EndpointConfig]) -> dict[str, Role]:
    """Return the role of every model that the endpoints name: a drafter that also answers is both."""
    roles: dict[str, Role] = {model: "target" for endpoint in endpoints for model in endpoint.answering}
    roles |= {endpoint.compressor: "target" for endpoint in endpoints if endpoint.compressor is not None}
    drafters = dict.fromkeys(endpoint.drafter for endpoint in endpoints if endpoint.drafter is not None)
    return roles | {drafter: "both" if drafter in roles else "drafter" for drafter in drafters}


def parent_of_adapters(target: str, endpoints: Endpoints) -> str | None:
    """Return the endpoint as which requests for a target's adapters are served: the first of that target alone."""
    alone = ("plain", "speculative")
    return next((name for name, config in endpoints.items() if config.target == target and config.kind in alone), None)


def missing_models(endpoints: Endpoints, models: Collection[str]) -> Iterator[str]:
    """Yield a line for each model that an endpoint names and nobody has."""
    for name, endpoint in endpoints.items():
        for key, model in endpoint.named_models():
            if model not in models:
                yield f"endpoints.{name}.{key}: there is no model {model!r}; {nearest(model, models)}"


def misfits(models: Models, endpoints: Endpoints) -> Iterator[str]:
    """Yield a line for each way in which endpoints and their models, which are all there, don't fit together."""
    roles = roles_in(endpoints.values())
    for name, endpoint in endpoints.items():
        if endpoint.drafter == endpoint.target:
            yield f"endpoints.{name}.drafter: {endpoint.drafter!r} is also the target; name another model or none"
    for name, model in models.items():
        yield from _colocation(name, model, endpoints)
        if name not in roles:
            yield f"models.{name}: no endpoint uses it; remove it or name it in an endpoint"
            continue
        yield from _devices(name, model, models)
        if model.activations is not None and (reason := _activations(model, models)) is not None:
            yield f"models.{name}.activations: {reason}, or remove the key"
        if model.adaptation is not None and (reason := _adaptation(name, model, roles[name])) is not None:
            yield f"models.{name}.adaptation: {reason}, or remove the key"
        if model.weights_at_run_time and (reason := _weights(name, model, endpoints)) is not None:
            yield f"models.{name}.weights_at_run_time: {reason}, or remove the key"
        if roles[name] == "both" and model.tensor_parallel > 1:
            yield (
                f"models.{name}.tensor_parallel: a tensor-parallel model can't be target and drafter at once; "
                "configure it twice, under two names"
            )
    yield from _heads(models, endpoints)
    yield from _corpora(endpoints)
    yield from _adapters(models, endpoints)


def _devices(name: str, model: ModelConfig, models: Models) -> Iterator[str]:
    if model.tensor_parallel > 1 and model.num_gpus == 0 and not (model.num_cpus or model.resources):
        yield f"models.{name}.tensor_parallel: set num_cpus, which each of its devices gets"
    gpus = models.get(model.colocated_with or name, model).num_gpus
    if model.device.startswith(("cuda", "balanced")) and gpus == 0:
        yield f"models.{name}.device: is {model.device!r}, but num_gpus gives its replicas no GPU"


def _activations(model: ModelConfig, models: Models) -> str | None:
    """Return why a model can't round its activations, unless that shows only where it is loaded."""
    owner = model if model.colocated_with is None else models.get(model.colocated_with, model)
    if owner.num_gpus or model.device.startswith(("cuda", "balanced")):
        return f"only CPUs compute with {model.activations}; set num_gpus: 0"
    if model.adaptation is not None:
        return "the weights of a drafter that adapts are no integers; remove adaptation"
    if model.quantization == "nf4":
        return "weights stored as nf4 are no integers; set quantization to int4 or int8"
    return None


def _adaptation(name: str, model: ModelConfig, role: Role) -> str | None:
    """Return why a model can't adapt, unless it is a drafter alone, on one device, with plain weights."""
    if role != "drafter":
        return f"{name!r} answers requests, too, whose text would change; name another drafter"
    if model.colocated_with is not None:
        return f"{name!r} runs in its target's thread, which would wait while weights are loaded; give it replicas"
    if model.tensor_parallel > 1:
        return "a tensor-parallel model can't adapt; set tensor_parallel to 1"
    if model.quantization is not None:
        return f"weights stored as {model.quantization} can't be replaced; remove `quantization`"
    return None


def _weights(name: str, model: ModelConfig, endpoints: Endpoints) -> str | None:
    """Return why a model can't get other weights while the server runs."""
    blended = [key for key, endpoint in endpoints.items() if name in endpoint.models and len(endpoint.models) > 1]
    if blended:
        return f"endpoints.{blended[0]} joins {name!r} with others; give that endpoint models of its own"
    if model.colocated_with is not None:
        return f"{name!r} runs in the replicas of {model.colocated_with!r}; give it its own"
    if model.adaptation is not None:
        return "a drafter that adapts replaces its weights by itself; remove adaptation"
    if model.tensor_parallel > 1 or model.device == "balanced":
        return "weights that are spread over devices stay; use one device"
    return None


def _heads(models: Models, endpoints: Endpoints) -> Iterator[str]:
    owners: dict[str, str] = {}  # the first endpoint with heads of each target
    reading = {each.target: name for name, each in endpoints.items() if each.formula and each.formula.read_layers}
    for name, endpoint in endpoints.items():
        if endpoint.heads is None:
            continue
        if endpoint.target in reading:
            key = f"endpoints.{reading[endpoint.target]}.formula"
            yield f"{key}: {endpoint.target!r} has heads, which read other layers; remove endpoints.{name}.heads"
        key = f"endpoints.{name}.heads"
        if endpoint.kind != "speculative" and not endpoint.synthesizes:
            yield f"{key}: heads know one model's choices; an endpoint that blends several can't have them"
            continue
        if models[endpoint.target].tensor_parallel > 1:
            yield f"{key}: heads need all of {endpoint.target!r} in one process; set its tensor_parallel to 1"
        if endpoint.heads.kind == "self" and models[endpoint.target].device == "balanced":
            yield f"{key}: a model that is spread over GPUs can't draft for itself; set its device to auto"
        if endpoint.heads.kind == "mtp" and is_gguf(models[endpoint.target].path):
            yield f"{key}: the MTP layers of .gguf files are not read; name the folder of the original as the target"
        for adapter in endpoint.heads.adapters:
            if not endpoint.heads.takes_adapters:
                yield f"{key}.adapters: {endpoint.heads.kind} heads take none; remove the key"
            elif adapter not in (known := models[endpoint.target].adapters):
                advice = nearest(adapter, known)
                yield f"{key}.adapters.{adapter}: no adapter of {endpoint.target} has this name; {advice}"
        other = owners.setdefault(endpoint.target, name)
        if endpoints[other].heads != endpoint.heads:
            yield f"{key}: {endpoint.target!r} has other heads in endpoints.{other}; it can load one set"


def _corpora(endpoints: Endpoints) -> Iterator[str]:
    owners: dict[str, str] = {}  # the first endpoint with a corpus of each target
    for name, endpoint in endpoints.items():
        if endpoint.corpus is not None:
            other = owners.setdefault(endpoint.target, name)
            if endpoints[other].corpus != endpoint.corpus:
                yield f"endpoints.{name}.corpus: {endpoint.target!r} has another in endpoints.{other}; it keeps one"


def _adapters(models: Models, endpoints: Endpoints) -> Iterator[str]:
    owners = dict.fromkeys(endpoints, "an endpoint")  # of names
    roles = roles_in(endpoints.values())
    for name, model in models.items():
        if not model.adapter_slots or name not in roles:
            continue
        key = f"models.{name}.{'adapters' if model.adapters else 'adapters_at_run_time'}"
        drafts_only = roles[name] == "drafter"
        if drafts_only:
            yield from _adapters_of_drafter(name, models, endpoints)
        elif parent_of_adapters(name, endpoints) is None:
            yield f"{key}: no endpoint has {name!r} as its `target` or `drafter`; only such models have adapters"
        if model.tensor_parallel > 1:
            yield f"{key}: a tensor-parallel model can't have any; set tensor_parallel to 1"
        if model.device == "balanced":
            yield f"{key}: a model that is spread over GPUs can't have any; set device to auto"
        for adapter in () if drafts_only else model.adapters:
            if adapter in owners:
                yield f"{key}.{adapter}: {owners[adapter]} has this name, too; take another"
            owners[adapter] = f"models.{name}.adapters"


def _adapters_of_drafter(name: str, models: Models, endpoints: Endpoints) -> Iterator[str]:
    drafter = models[name]
    targets = {endpoint.target: models[endpoint.target] for endpoint in endpoints.values() if endpoint.drafter == name}
    known = [adapter for target in targets.values() for adapter in target.adapters]
    for adapter in drafter.adapters:
        if adapter not in known:
            advice = nearest(adapter, known)
            yield f"models.{name}.adapters.{adapter}: no adapter of {' or '.join(targets)} has this name; {advice}"
    if drafter.adapters_at_run_time and not any(target.adapters_at_run_time for target in targets.values()):
        yield f"models.{name}.adapters_at_run_time: none of its targets has this key; set it there, too"
    if drafter.adaptation is not None:
        yield f"models.{name}.adapters: a drafter that learns while it serves can't have any; remove one of the keys"


def _colocation(name: str, drafter: ModelConfig, endpoints: Endpoints) -> Iterator[str]:
    target, key = drafter.colocated_with, f"models.{name}.colocated_with"
    if target is None:
        return
    if not any(endpoint.drafter == name and endpoint.target == target for endpoint in endpoints.values()):
        yield f"{key}: no endpoint has the target {target!r} and the drafter {name!r}"
        return
    for endpoint_name, endpoint in endpoints.items():
        where = f"endpoints.{endpoint_name}"
        if name in (*endpoint.answering, endpoint.compressor):
            yield f"{key}: {where} names {name!r} as a model that answers or compresses, which needs its own replicas"
        elif endpoint.drafter is not None and (endpoint.drafter == name) != (endpoint.target == target):
            pair = f"{endpoint.drafter!r} with the target {endpoint.target!r}"
            yield f"{where}.drafter: {pair}: {name!r} is colocated with {target!r}, so they work for each other only"
    if own := sorted(drafter.model_fields_set & REPLICA_KEYS):
        yield f"models.{name}.{own[0]}: {name!r} runs in the replicas of {target!r}; remove the key"
