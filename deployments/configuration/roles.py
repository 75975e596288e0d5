"""What each model is for, which follows from the endpoints that name it. Loads nothing."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from decoding.errors import ConfigError
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig
from deployments.validation.strict import nearest

if TYPE_CHECKING:
    from actors.replica.replica import Role


_OF_REPLICAS = {"slots", "threads", "replicas", "scaling", "tensor_parallel", "num_cpus", "num_gpus", "resources"}


def roles_in(endpoints: Collection[EndpointConfig]) -> dict[str, "Role"]:
    """Of the models that these endpoints name. One that is target, or member, and drafter is both."""
    roles: dict[str, Role] = {model: "target" for endpoint in endpoints for model in endpoint.models}
    drafters = dict.fromkeys(endpoint.drafter for endpoint in endpoints if endpoint.drafter is not None)
    return roles | {drafter: "both" if drafter in roles else "drafter" for drafter in drafters}


def check_roles(models: Mapping[str, ModelConfig], endpoints: Mapping[str, EndpointConfig]) -> None:
    """Raises ConfigError where an endpoint and a model don't fit together."""
    for name, endpoint in endpoints.items():
        drafter = [] if endpoint.drafter is None else [("drafter", endpoint.drafter)]
        for key, model in (*endpoint.named_models(), *drafter):
            if model not in models:
                suggestion = nearest(model, models)
                raise ConfigError(f"endpoints.{name}.{key}: there is no model {model!r}; {suggestion}")
        if endpoint.drafter == endpoint.target:
            leads = f"{endpoint.drafter!r} is the model that it would draft for"
            raise ConfigError(f"endpoints.{name}.drafter: {leads}; name another one, or leave it out")
    _check_inside(models, endpoints)
    roles = roles_in(endpoints.values())
    for name, role in roles.items():
        used = models[name]
        if role == "both" and used.tensor_parallel > 1:
            raise ConfigError(
                f"models.{name}.tensor_parallel: a model over several devices can't be target and drafter at once; "
                "configure it twice, under two names"
            )
        if role != "drafter" and used.scaling is not None and used.scaling.min == 0:
            raise ConfigError(f"models.{name}.scaling.min: is 0, but a target needs 1 or more")
    unused = set(models) - set(roles)
    if unused:
        raise ConfigError(f"models.{min(unused)}: no endpoint uses it; remove it or name it in an endpoint")


def _check_inside(models: Mapping[str, ModelConfig], endpoints: Mapping[str, EndpointConfig]) -> None:
    """Drafters inside targets: one each, which drafts for that target alone, and has nothing that replicas have."""
    for name, model in models.items():
        if model.inside is None:
            continue
        key = f"models.{name}.inside"
        uses = [(f"endpoints.{one}", endpoint) for one, endpoint in endpoints.items()]
        if not any(endpoint.drafter == name and endpoint.target == model.inside for _, endpoint in uses):
            raise ConfigError(f"{key}: no endpoint has the target {model.inside!r} and the drafter {name!r}")
        for where, endpoint in uses:
            if name in endpoint.models:
                raise ConfigError(f"{key}: {where} names {name!r} as a model that answers; such a one needs replicas")
            if endpoint.drafter is not None and (endpoint.drafter == name) != (endpoint.target == model.inside):
                reason = f"{name!r} drafts inside {model.inside!r}, so each drafts with the other only"
                raise ConfigError(
                    f"{where}.drafter: {endpoint.drafter!r} with the target {endpoint.target!r}: {reason}"
                )
        if own := sorted(model.model_fields_set & _OF_REPLICAS):
            raise ConfigError(
                f"models.{name}.{own[0]}: it is inside {model.inside!r}, and has what that has; remove it"
            )
        if models[model.inside].slots == "auto":
            raise ConfigError(f"models.{model.inside}.slots: say how many; {name!r} inside it needs as many")
