"""What `consort bench` and `consort compare` measure: an endpoint of a configuration, and prompts for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.endpoint import EndpointConfig

SLOTS = 16  # the most streams that are measured
_MAX_LENGTH = 512

Report = Callable[[str], None]  # called with each step that begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, and the endpoint that answers them."""

    config: ServerConfig
    endpoint: str
    prompts: Sequence[str]
    new_tokens: int  # of each answer
    temperature: float


def pair_config(
    target: str, drafter: str, *, target_options: Mapping[str, Any], drafter_options: Mapping[str, Any]
) -> tuple[ServerConfig, str]:
    """Return a configuration of two models, and its endpoint. Options are keys of `models.NAME`; None: the default."""
    models = {
        name: {"path": path, **_model_options(options)}
        for name, path, options in (("target", target, target_options), ("drafter", drafter, drafter_options))
    }
    document = {"models": models, "endpoints": {"bench": {"target": "target", "drafter": "drafter"}}}
    return parse_config(document, folder=Path.cwd()), "bench"


def drafting_endpoint(path: Path, endpoint: str | None) -> tuple[ServerConfig, str]:
    """Return a configuration with slots for a measurement, and its endpoint, or the first, of one model that drafts."""
    return _endpoint(
        path,
        endpoint,
        lambda endpoint: bool(endpoint.drafter or endpoint.heads) and not _has_members(endpoint),
        wanted="of one model that drafts; those that do",
    )


def ensemble_endpoint(path: Path, endpoint: str | None) -> tuple[ServerConfig, str]:
    """Return a configuration and its endpoint with members, as `drafting_endpoint` does."""
    return _endpoint(path, endpoint, _has_members, wanted="with members; those with some")


def _endpoint(
    path: Path, endpoint: str | None, fits: Callable[[EndpointConfig], bool], *, wanted: str
) -> tuple[ServerConfig, str]:
    config = load_config(path)
    fitting = [name for name, settings in config.endpoints.items() if fits(settings)]
    name = endpoint or next(iter(fitting), "")
    if name not in fitting:
        raise ConfigError(f"{path}: no endpoint {name} {wanted}: {', '.join(fitting) or 'none'}")
    for model in config.models.values():
        model.slots, model.max_length = SLOTS, min(model.max_length or _MAX_LENGTH, _MAX_LENGTH)
    return config, name


def _has_members(endpoint: EndpointConfig) -> bool:
    return endpoint.kind in ("ensemble", "contrastive")


def _model_options(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in options.items() if value is not None}
    gpus = {"num_gpus": 1} if str(given.get("device", "")).startswith("cuda") else {}
    return {"slots": SLOTS, "max_length": _MAX_LENGTH, **gpus, **given}
