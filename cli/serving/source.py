"""What `consort serve` is to serve: a configuration or a model, with a plan for this machine. Starts nothing."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml

from cli.serving.options import flag, given_options, model_server
from decoding.errors import ConfigError
from deployments.configuration.api_keys import environment_key
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.paths import PACKAGE, locate
from deployments.planning.hub import Snapshot
from deployments.planning.machine import Machine
from deployments.planning.model_server import BUNDLED
from deployments.planning.plan import GIB, Plan, plan_server, planned

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration, and what its plan may decide.

    own_drafters: drafters that may be colocated, because no file says otherwise.
    memory_share: of each GPU's memory, for each model.
    """

    config: ServerConfig
    own_drafters: frozenset[str] = frozenset()
    memory_share: float | None = None

    def planned(self, machine: Machine, snapshots: Mapping[str, Snapshot]) -> tuple[ServerConfig, Plan]:
        """Return the configuration with all that this machine decides.

        Raises:
            ConfigError: a model does not fit.
        """
        plan = plan_server(self.config, machine, snapshots=snapshots, may_colocate=self.own_drafters)
        if self.memory_share is None:
            return planned(self.config, plan), plan
        if not plan.gpus:
            return planned(self.config, plan), replace(
                plan, notes=(*plan.notes, "--gpu-memory-utilization does nothing without a GPU")
            )
        limit = min(gpu.total_bytes for gpu in machine.gpus) * self.memory_share / GIB
        models = {
            name: model.model_copy(update={"memory_gib": round(limit, 3)}) if plan.models[name].num_gpus else model
            for name, model in self.config.models.items()
        }
        config = self.config.model_copy(update={"models": models})
        plan = plan_server(config, machine, snapshots=snapshots, may_colocate=self.own_drafters)
        return planned(config, plan), plan


def read_source(argument: str | None, options: Mapping[str, Any]) -> Source:
    """Read what to serve.

    Args:
        argument: a file that ends in .yaml or .yml, "-" for YAML on standard input, or a model. None: the default
            configuration or, with options, its target; so does its name, "smollm2".
        options: for a model, by name.

    Raises:
        ConfigError: the configuration is wrong, or there is no such model.
        click.UsageError: options for a model were given beside a configuration.
    """
    argument, given = as_argument(argument), given_options(options)
    is_file = argument is not None and (argument == STANDARD_INPUT or argument.lower().endswith((".yaml", ".yml")))
    if is_file and given:
        name = next(iter(given))
        raise click.UsageError(f"{flag(name)} is for a MODEL; in a configuration, set the key in the file")
    if argument == STANDARD_INPUT:
        return Source(_from_standard_input())
    if argument is not None and is_file:
        return Source(load_config(Path(argument)))
    if argument is None and not given:
        return Source(load_config())
    server = model_server(default_model() if argument is None else argument, options)
    config = server.config()
    drafters = {endpoint.drafter for endpoint in config.endpoints.values() if endpoint.drafter is not None}
    return Source(config, frozenset(drafters), given.get("gpu_memory_utilization"))


def as_argument(model: str | None) -> str | None:
    """Return the argument for a model: None for the default one by its name."""
    is_default = model is not None and model.lower() == BUNDLED and not Path(model).exists()
    return None if is_default else model


def default_model() -> str:
    """Return the path of the default configuration's target."""
    config = load_config()
    return next(model.path for model in config.models.values() if model.path.startswith(PACKAGE))


def as_yaml(config: ServerConfig) -> str:
    """Return a configuration as a file that serves the same. Of keys it has digests, and not the environment's."""
    document = config.model_dump(mode="json", exclude_defaults=True)
    for name, model in config.models.items():
        document["models"][name]["path"] = model.path if model.path.startswith(PACKAGE) else locate(model.path)
        document["models"][name]["num_gpus"] = model.num_gpus
        if model.colocated_with is not None:
            del document["models"][name]["num_gpus"]
    for name, endpoint in config.endpoints.items():
        if endpoint.kind in ("ensemble", "contrastive"):
            del document["endpoints"][name]["target"]  # follows from its members
    if environment_key() is not None:  # its name can't be another key's then
        document.get("http", {}).get("api_keys", {}).pop("environment", None)
    document = {key: value for key, value in document.items() if value}
    return yaml.safe_dump(_plain(document), sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    """Return YAML's values with whole numbers as such."""
    match value:
        case dict():
            return {key: _plain(part) for key, part in value.items()}
        case list():
            return [_plain(part) for part in value]
        case float() if value.is_integer():
            return int(value)
    return value


def _from_standard_input() -> ServerConfig:
    try:
        data = yaml.safe_load(sys.stdin.read())
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read standard input: {error}") from error
    return parse_config(data, folder=Path.cwd())
