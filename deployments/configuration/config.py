"""The configuration of a server, read from YAML and checked."""

from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from decoding.drafts.options import CorpusOptions
from decoding.errors import InvalidRequestError
from decoding.sampling.params import SamplingParams
from deployments.configuration.api_keys import environment_key
from deployments.configuration.document import Mistakes, read_document, without_removed_keys
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.http import HttpConfig
from deployments.configuration.model import MAX_LENGTH, ModelConfig
from deployments.configuration.paths import ROOT, anchored, check_checkpoint, nested_adapter, template_text
from deployments.configuration.responses import ResponsesConfig
from deployments.configuration.roles import Role, misfits, missing_models, parent_of_adapters, roles_in
from deployments.configuration.templates import TemplateSource
from deployments.configuration.values import Name, check_name
from deployments.fields.strict import StrictModel, problems_of
from engine.heads.spec import HeadsSpec

_Part = TypeVar("_Part", bound=StrictModel)

DEFAULT_CONFIG = ROOT / "deployments" / "default.yaml"
ENSEMBLE_CONFIG = ROOT / "deployments" / "ensemble.yaml"  # an endpoint of each kind, of the bundled models
TINY_CONFIG = ROOT / "models" / "tiny.yaml"  # the bundled pair, for tests and benchmarks


class ServerConfig(StrictModel):
    """The whole configuration file."""

    models: dict[Name, ModelConfig] = Field(min_length=1, description="Models by name.")
    endpoints: dict[Name, EndpointConfig] = Field(min_length=1, description="What clients can request, by name.")
    templates: dict[Name, TemplateSource] = Field(
        default_factory=dict, description="Prompt templates, in Jinja, by name."
    )
    http: HttpConfig = Field(default_factory=HttpConfig, description="The HTTP interface.")
    responses: ResponsesConfig = Field(
        default_factory=ResponsesConfig, description="What is kept of answers to /v1/responses."
    )

    def roles(self) -> dict[str, Role]:
        """Return the role of each model that has replicas of its own, as the endpoints use it."""
        roles = roles_in(self.endpoints.values())
        return {name: role for name, role in roles.items() if self.models[name].colocated_with is None}

    def colocated_drafter_of(self, target: str) -> dict[str, ModelConfig]:
        """The drafter that runs in a target's replicas, by name, with its cache's size; empty if there is none."""
        size = {"slots": self.models[target].slots, "kv_tokens": self.models[target].kv_tokens}
        drafters = {name: model for name, model in self.models.items() if model.colocated_with == target}
        return {name: model.model_copy(update=size) for name, model in drafters.items()}

    def adapters_of(self, endpoint: str) -> dict[str, str]:
        """Return the adapters whose requests are served as the endpoint's, by name: paths."""
        target = self.endpoints[endpoint].target
        return self.models[target].adapters if parent_of_adapters(target, self.endpoints) == endpoint else {}

    def drafter_adapters_of(self, endpoint: str) -> dict[str, str]:
        """Return the adapters of an endpoint's drafter, by the names of the target's: paths."""
        drafter = self.endpoints[endpoint].drafter
        drafts_only = drafter is not None and roles_in(self.endpoints.values())[drafter] == "drafter"
        return self.models[drafter].adapters if drafter is not None and drafts_only else {}

    @property
    def loads_code(self) -> bool:
        """Whether a coordinator loads code that is named here, which may need anything, or checks weights by torch."""
        endpoints, models = self.endpoints.values(), self.models.values()
        return any(model.trust_remote_code or model.weights_at_run_time for model in models) or any(
            endpoint.stopping or (endpoint.strategy is not None and endpoint.strategy.utility) for endpoint in endpoints
        )

    def max_adapters_of(self, endpoint: str) -> int:
        """Return how many adapters an endpoint may have if some may be loaded at run time; else 0."""
        target = self.endpoints[endpoint].target
        takes_more = target in self.models and self.models[target].adapters_at_run_time > 0
        is_parent = parent_of_adapters(target, self.endpoints) == endpoint
        return self.models[target].adapter_slots if takes_more and is_parent else 0

    def corpus_of(self, target: str) -> CorpusOptions | None:
        named = [endpoint.corpus for endpoint in self.endpoints.values() if endpoint.target == target]
        return next((CorpusOptions(corpus.max_tokens, corpus.path) for corpus in named if corpus is not None), None)

    def heads_of(self, target: str) -> HeadsSpec | None:
        named = ((name, endpoint.heads) for name, endpoint in self.endpoints.items() if endpoint.target == target)
        return next((heads.spec(name, self.models[target]) for name, heads in named if heads is not None), None)


def parse_config(data: object, *, folder: Path) -> ServerConfig:
    """Check a parsed YAML document; raises ConfigError that names each wrong key. folder: base of relative paths."""
    mistakes = Mistakes()
    config = _checked(data, folder, mistakes)
    mistakes.check()
    return config


def load_config(path: Path = DEFAULT_CONFIG) -> ServerConfig:
    """Read the configuration in a YAML file; raises ConfigError as `parse_config`, or if the file can't be read.

    path: relative to the working directory or, like `deployments/ensemble.yaml`, to what comes with Consort.
    """
    if not path.exists() and (ROOT / path).is_file():
        path = ROOT / path
    data, mistakes = read_document(path), Mistakes()
    config = _checked(data, path.resolve().parent, mistakes)
    for name, model in config.models.items():
        with mistakes.noted():
            check_checkpoint(f"models.{name}", model.path, model.max_length, safetensors_only=model.safetensors_only)
    mistakes.check(of=f"{path}: ")
    return config


def _checked(data: object, folder: Path, mistakes: Mistakes) -> ServerConfig:
    """Return the configuration, or where there are mistakes the parts that are right by themselves."""
    data = without_removed_keys(data, mistakes)
    try:
        config, is_sound = ServerConfig.model_validate(data), True
    except ValidationError as error:
        for path, problem in problems_of(error):
            mistakes.note(f"{path or 'the configuration'}: {problem}")
        config, is_sound = _sound_parts(data), False
    models = data.get("models") if isinstance(data, dict) else None
    missing = list(missing_models(config.endpoints, models if isinstance(models, dict) else {}))
    mistakes.note(*missing)
    for name, endpoint in config.endpoints.items():
        _check_endpoint(name, endpoint, folder, mistakes)
    if is_sound and not missing:
        mistakes.note(*misfits(config.models, config.endpoints))
    for name, model in config.models.items():
        _anchor_model(name, model, folder, mistakes)
    if is_sound and not missing:
        _find_drafter_adapters(config)
        _find_heads_adapters(config)
        _find_early_exits(config)
    _check_http(config.http, folder, mistakes)
    with mistakes.noted():
        config.responses = config.responses.anchored(folder)
    return config


def _sound_parts(data: object) -> ServerConfig:
    document = data if isinstance(data, dict) else {}

    def sound(kind: type[_Part], entries: object) -> dict[str, _Part]:
        parsed = {name: _parsed(kind, entry) for name, entry in (entries if isinstance(entries, dict) else {}).items()}
        return {str(name): part for name, part in parsed.items() if part is not None}

    return ServerConfig.model_construct(
        models=sound(ModelConfig, document.get("models")),
        endpoints=sound(EndpointConfig, document.get("endpoints")),
        http=_parsed(HttpConfig, document.get("http", {})) or HttpConfig(),
        responses=_parsed(ResponsesConfig, document.get("responses", {})) or ResponsesConfig(),
    )


def _parsed(kind: type[_Part], data: object) -> _Part | None:
    try:
        return kind.model_validate(data)
    except ValidationError:
        return None


def _check_endpoint(name: str, endpoint: EndpointConfig, folder: Path, mistakes: Mistakes) -> None:
    """Note what is wrong with an endpoint by itself, and anchor the paths of its heads and its corpus."""
    with mistakes.noted():
        check_name("endpoints", name)
    try:
        SamplingParams(max_tokens=MAX_LENGTH, **endpoint.defaults.arguments())
    except InvalidRequestError as error:
        mistakes.note(f"endpoints.{name}.defaults.{error}")
    if endpoint.corpus is not None and endpoint.corpus.path is not None:
        endpoint.corpus.path = str(folder / endpoint.corpus.path)
    if endpoint.heads is not None and endpoint.heads.path is not None:
        with mistakes.noted():
            endpoint.heads.path = anchored(endpoint.heads.path, folder, key=f"endpoints.{name}.heads.path")
    adapters = {} if endpoint.heads is None else endpoint.heads.adapters
    for adapter, path in adapters.items():
        with mistakes.noted():
            adapters[adapter] = anchored(path, folder, key=f"endpoints.{name}.heads.adapters.{adapter}")


def _anchor_model(name: str, model: ModelConfig, folder: Path, mistakes: Mistakes) -> None:
    with mistakes.noted():
        model.path = anchored(model.path, folder, key=f"models.{name}.path")
    if model.adapter is not None:
        with mistakes.noted():
            model.adapter = anchored(model.adapter, folder, key=f"models.{name}.adapter")
    if model.chat_template is not None:
        with mistakes.noted():
            model.chat_template = template_text(model.chat_template, folder, key=f"models.{name}.chat_template")
    for adapter, path in model.adapters.items():
        with mistakes.noted():
            check_name(f"models.{name}.adapters", adapter)
            model.adapters[adapter] = anchored(path, folder, key=f"models.{name}.adapters.{adapter}")


def _find_drafter_adapters(config: ServerConfig) -> None:
    """Add to a drafter's adapters those in the folders of its targets' adapters."""
    roles = roles_in(config.endpoints.values())
    for name, endpoint in config.endpoints.items():
        if endpoint.drafter is None or roles[endpoint.drafter] != "drafter":
            continue
        drafter = config.models[endpoint.drafter]
        for adapter, path in config.adapters_of(name).items() if drafter.can_have_adapters else ():
            nested = nested_adapter(path, "drafter")
            if nested is not None:
                drafter.adapters.setdefault(adapter, nested)


def _find_heads_adapters(config: ServerConfig) -> None:
    for endpoint in config.endpoints.values():
        heads = endpoint.heads
        if heads is None or not heads.takes_adapters:
            continue
        for adapter, path in config.models[endpoint.target].adapters.items():
            nested = nested_adapter(path, "heads")
            if nested is not None:
                heads.adapters.setdefault(adapter, nested)


def _find_early_exits(config: ServerConfig) -> None:
    for name, model in config.models.items():
        formulas = [endpoint.formula for endpoint in config.endpoints.values() if endpoint.target == name]
        model.note_early_exits(set().union(*(formula.read_layers for formula in formulas if formula is not None)))


def _check_http(http: HttpConfig, folder: Path, mistakes: Mistakes) -> None:
    """Replace the secrets of all keys by digests, add the key from the environment, and anchor the certificate."""
    for name, key in http.api_keys.items():
        with mistakes.noted():
            http.api_keys[name] = key.digested(name, folder)
    with mistakes.noted():
        if (own := environment_key()) is not None:
            http.add_key("environment", own)
    with mistakes.noted():
        http.tls = http.tls and http.tls.anchored(folder)
