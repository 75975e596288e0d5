"""The configuration of a server, read from YAML. Must not know Ray or loaded models."""

from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import Field, ValidationError

from decoding.errors import ConfigError
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.http import HttpConfig
from deployments.configuration.keys import environment_key
from deployments.configuration.model import ROOT, ModelConfig, locate
from deployments.configuration.names import Name, check_names
from deployments.configuration.roles import check_roles, roles_in
from deployments.configuration.templates import TemplateSource
from deployments.validation.strict import StrictModel, problem_of

if TYPE_CHECKING:
    from actors.heads.spec import HeadsSpec
    from actors.replica.roles import Role

DEFAULT_CONFIG = ROOT / "deployments" / "default.yaml"
TINY_CONFIG = ROOT / "models" / "tiny.yaml"  # the bundled pair, for tests and benchmarks


class ServerConfig(StrictModel):
    """The whole configuration file."""

    models: dict[Name, ModelConfig] = Field(min_length=1, description="Models by name.")
    endpoints: dict[Name, EndpointConfig] = Field(min_length=1, description="What clients can request, by name.")
    templates: dict[Name, TemplateSource] = Field(
        default_factory=dict, description="Prompt templates, in Jinja, by name."
    )
    http: HttpConfig = Field(default_factory=HttpConfig, description="The HTTP interface.")

    def roles(self) -> dict[str, "Role"]:
        """Return the role of each model that has replicas of its own, as the endpoints use it."""
        roles = roles_in(self.endpoints.values())
        return {name: role for name, role in roles.items() if self.models[name].colocated_with is None}

    def colocated_drafter_of(self, target: str) -> dict[str, ModelConfig]:
        """The drafter that runs in a target's replicas, by name, with its cache's size; empty if there is none."""
        size = {"slots": self.models[target].slots, "kv_tokens": self.models[target].kv_tokens}
        drafters = {name: model for name, model in self.models.items() if model.colocated_with == target}
        return {name: model.model_copy(update=size) for name, model in drafters.items()}

    def heads_of(self, target: str) -> "HeadsSpec | None":
        """Return the heads that a target's replicas load, if any."""
        named = ((name, endpoint.heads) for name, endpoint in self.endpoints.items() if endpoint.target == target)
        return next((heads.spec(name) for name, heads in named if heads is not None), None)


def parse_config(data: object, *, folder: Path) -> ServerConfig:
    """Check a parsed YAML document and return its configuration. folder: the base of relative paths.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or the parts don't fit together. The text names the key.
    """
    try:
        config = ServerConfig.model_validate(data)
    except ValidationError as error:
        path, problem = problem_of(error)
        raise ConfigError(f"{path or 'the configuration'}: {problem}") from error
    check_names(config.endpoints)
    check_roles(config.models, config.endpoints)
    _check_devices(config)
    _read_keys(config.http, folder)
    for name, endpoint in config.endpoints.items():
        if endpoint.heads is not None:
            endpoint.heads.path = _anchor(endpoint.heads.path, folder)
            if endpoint.heads.path.startswith((".", "/", "~")) and not Path(locate(endpoint.heads.path)).is_dir():
                raise ConfigError(f"endpoints.{name}.heads.path: there is no folder {endpoint.heads.path!r}")
    for name, model in config.models.items():
        model.path = _anchor(model.path, folder)
        try:
            located = locate(model.path)
        except ConfigError as error:
            raise ConfigError(f"models.{name}.path: {error}") from error
        if model.path.startswith((".", "/", "~")) and not _is_checkpoint(located):
            raise ConfigError(f"models.{name}.path: there is no folder or .gguf file {model.path!r}")
    return config


def _is_checkpoint(path: str) -> bool:
    return Path(path).is_file() if path.lower().endswith(".gguf") else Path(path).is_dir()


def load_config(path: Path = DEFAULT_CONFIG) -> ServerConfig:
    """Read the configuration in a YAML file; by default, the one that serves SmolLM2-135M-Instruct.

    path: relative to the working directory or, like `deployments/ensemble.yaml`, to what comes with Consort.

    Raises:
        ConfigError: the file can't be read, or the configuration is wrong (see `parse_config`).
    """
    if not path.exists() and (ROOT / path).is_file():
        path = ROOT / path
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    try:
        return parse_config(data, folder=path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _anchor(path: str, folder: Path) -> str:
    """Return a path that does not depend on the configuration's folder or on the working directory."""
    for candidate in (folder / path, Path(path)):
        if _is_checkpoint(str(candidate)):
            absolute = candidate.resolve()
            return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)
    return path


def _read_keys(http: HttpConfig, folder: Path) -> None:
    """Replace the secrets of all keys by digests, and add the key from the environment."""
    http.api_keys = {name: key.digested(name, folder) for name, key in http.api_keys.items()}
    if (key := environment_key()) is not None:
        http.add_key("environment", key)


def _check_devices(config: ServerConfig) -> None:
    for name, model in config.models.items():
        if model.tensor_parallel > 1 and not (model.num_cpus or model.num_gpus or model.resources):
            raise ConfigError(
                f"models.{name}.tensor_parallel: set num_cpus or num_gpus, which each of its devices gets"
            )
        gpus = config.models[model.colocated_with or name].num_gpus
        if model.device.startswith(("cuda", "balanced")) and gpus == 0:
            raise ConfigError(f"models.{name}.device: is {model.device!r}, but num_gpus gives its replicas no GPU")
