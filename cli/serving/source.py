"""What `consort serve` is to serve: a configuration or a model, with a plan for this machine, also in words."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import yaml
from rich.box import SIMPLE
from rich.table import Table

from cli.serving.options import flag, given_options, model_server
from decoding.errors import ConfigError
from deployments.configuration.api_keys import environment_key
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import MAX_LENGTH, ModelConfig
from deployments.configuration.paths import PACKAGE, locate, parameter_count, positions_of, read_header
from deployments.planning.devices import Machine
from deployments.planning.hub import Snapshot
from deployments.planning.model_server import BUNDLED, with_own_heads
from deployments.planning.model_size import shown_size
from deployments.planning.plan import GIB, Assignment, Plan, plan_server, planned

STANDARD_INPUT = "-"
_ROUND = 1000  # tokens: the number is an estimate
_MOST_LINES = 6  # of a plan
_NGRAMS = "n-grams"


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration, and what its plan may decide.

    own_drafters: drafters that may be colocated, because no file says otherwise.
    memory_share: of each GPU's memory, for each model.
    uses_own_heads: whether a target's own MTP layer may draft.
    """

    config: ServerConfig
    own_drafters: frozenset[str] = frozenset()
    memory_share: float | None = None
    uses_own_heads: bool = False

    def planned(self, machine: Machine, snapshots: Mapping[str, Snapshot]) -> tuple[ServerConfig, Plan]:
        """Return the configuration with all that this machine decides. Raises ConfigError if a model does not fit."""
        if self.uses_own_heads:
            config, notes = with_own_heads(self.config, snapshots)
            config, plan = replace(self, config=config, uses_own_heads=False).planned(machine, snapshots)
            return config, replace(plan, notes=(*plan.notes, *notes))
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
    own_heads = server.drafter == "auto"
    return Source(config, frozenset(drafters), given.get("gpu_memory_utilization"), uses_own_heads=own_heads)


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


def plan_lines(plan: Plan, config: ServerConfig) -> list[str]:
    """Return a line for each model and each endpoint that drafts, and the plan's notes: six lines at most."""
    models = sorted(plan.models.values(), key=lambda model: model.drafts_for is not None)
    lines = [*(_model_line(model, config) for model in models), *_draft_lines(config), *plan.notes]
    left = len(lines) - _MOST_LINES
    return lines if left <= 0 else [*lines[: _MOST_LINES - 1], f"… {left + 1} lines more: --print-config shows all"]


def configured_table(config: ServerConfig) -> Table:
    """Return what clients can ask for, and the models behind it."""
    table = Table("model", "target", "drafter", "draft length", "context", box=SIMPLE)
    for name, endpoint in config.endpoints.items():
        lengths = [_context_length(config.models[model]) for model in endpoint.models]
        table.add_row(
            name,
            " + ".join(_description(model, config) for model in endpoint.answering),
            " + ".join(_drafters(endpoint, config)) or "–",
            str(endpoint.draft_length if endpoint.drafts else 0),
            "–" if None in lengths else str(min(length for length in lengths if length is not None)),
        )
    return table


def _context_length(model: ModelConfig) -> int | None:
    """Return the most tokens of a request; None if only a checkpoint that is not here tells."""
    folder = Path(locate(model.path))
    if model.max_length is not None or not (folder / "config.json").is_file():
        return model.max_length
    positions = positions_of(read_header(folder))
    return None if positions is None else min(positions, MAX_LENGTH)


def _description(name: str, config: ServerConfig) -> str:
    path = config.models[name].path
    count = parameter_count(Path(locate(path)))
    size = f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    return f"{name} ({size}, {path})" if count else f"{name} ({path})"


def _drafters(endpoint: EndpointConfig, config: ServerConfig) -> Iterator[str]:
    if endpoint.drafter is not None:
        yield _description(endpoint.drafter, config)
    if endpoint.heads is not None:
        yield str(endpoint.heads)
    if endpoint.ngram is not None:
        yield _NGRAMS
    if endpoint.corpus is not None:
        yield "earlier texts"


def _model_line(model: Assignment, config: ServerConfig) -> str:
    replicas, size = config.models[model.name].replicas, model.size
    sizes = [
        *([] if size is None else [f"{shown_size(size.weights_bytes)} of weights"]),
        *([] if model.kv_tokens is None else [f"about {_rounded(model.kv_tokens):,} tokens of KV"]),
    ]
    copies = f"{replicas} replicas " if replicas > 1 else ""
    role = "drafter" if model.drafts_for is not None else "target"
    text = f"{role} {model.name}: {copies}{_where(model)}"
    rounded = config.models[model.name].activations
    sizes += [] if rounded is None else [f"activations in {rounded}"]
    reads = "" if size is None or size.bytes_per_token is None else f"; {size.bytes_per_token}"
    return ", ".join([text, *sizes]) + (", each" if replicas > 1 and sizes else "") + reads


def _where(model: Assignment) -> str:
    if model.colocated_with is not None:
        return f"in the replicas of {model.colocated_with}"
    if model.gpus:
        return f"on GPU {', '.join(map(str, model.gpus))}"
    if model.num_gpus:
        return f"on {model.num_gpus:g} GPU"
    threads = model.threads or max(int(model.num_cpus), 1)
    return f"on {threads} CPU thread{'s' if threads > 1 else ''}"


def _rounded(tokens: int) -> int:
    return tokens // _ROUND * _ROUND if tokens >= 10 * _ROUND else tokens


def _draft_lines(config: ServerConfig) -> Iterator[str]:
    for name, endpoint in config.endpoints.items():
        drafters = list(_drafters(endpoint, config))
        hint = "; `consort train drafter` makes a drafter for it" if drafters == [_NGRAMS] else ""
        if drafters:
            yield f"drafts for {name}: {', '.join(drafters)}{hint}"
