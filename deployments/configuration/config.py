"""The configuration of a server: models, endpoints and HTTP, from YAML. Knows nothing of Ray or of loaded models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import Field, TypeAdapter, ValidationError, WrapValidator

from decoding.errors import ConfigError
from decoding.params import MAX_LOGPROBS, Verification
from deployments.configuration.ensembles import EnsembleConfig
from deployments.configuration.keys import ApiKeyConfig, environment_key
from deployments.configuration.names import check_names
from deployments.configuration.roles import check_roles, roles_in
from deployments.configuration.scaling import ScalingConfig
from deployments.configuration.strict import StrictModel, problem_of
from deployments.configuration.tracing import TracingConfig
from deployments.http.keys import KeyRing
from deployments.requests.fields import MIN_TIMEOUT_S
from deployments.requests.json_body import MAX_BODY_BYTES
from deployments.requests.sampling_fields import SamplingFields

if TYPE_CHECKING:
    from actors.loading import ModelSpec
    from actors.replica import Role

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = Path(__file__).resolve().parents[1] / "default.yaml"

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$", max_length=200)]
Count = Annotated[int, Field(ge=1)]
_count: TypeAdapter[int] = TypeAdapter(Count)
Slots = Annotated[  # anything but "auto" is judged as a number, so that the message is about that
    int | Literal["auto"],
    WrapValidator(lambda value, _: value if value == "auto" else _count.validate_python(value, strict=True)),
]


class ModelConfig(StrictModel):
    """A model to load, and what each of its replicas gets."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="A folder, relative to the configuration's own folder, or an id on the Hugging Face Hub."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    trust_remote_code: bool = Field(False, description="Run the Python code that comes with the checkpoint.")
    safetensors_only: bool = Field(
        True, description="Refuse pickled weights, which can run any code when they are loaded."
    )
    adapter: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="LoRA weights to merge into the model: a folder, or an id on the Hub. Needs consort[lora]."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto: as stored."
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None, description="Keep the weights of linear layers in 4 bits (nf4, doubly quantised) or 8 (int8)."
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = Field(
        "auto", description="Type of the KV slots; auto: as the layers compute."
    )
    device: Annotated[str, Field(pattern=r"^(auto|balanced|cpu|cuda(:\d+)?)$")] = Field(
        "auto",
        description="auto (a GPU where the replica has one, else the CPU), cpu, cuda, or balanced: the layers spread "
        "over all GPUs of the replica.",
    )
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Most GiB of weights and KV slots together, on each device; null: 90 % of what is free."
    )
    slots: Slots = Field(
        16,
        description="Requests that run at once on a replica, further ones wait for a slot; auto: as many as fit into "
        "memory, up to 64.",
    )
    max_length: Count = Field(1024, description="Tokens per slot: prompt and answer together.")
    prefill_chunk: Count = Field(256, description="Prompt tokens processed between two steps of running requests.")
    tensor_parallel: Count = Field(
        1, description="Devices that each replica spreads every layer over; each gets num_cpus, num_gpus and resources."
    )
    threads: Count | None = Field(None, description="CPU threads of a replica; by default num_cpus, at least 1.")
    inside: str | None = Field(
        None,
        description="Of a drafter: run it inside this target's replicas, by turns on their device, without replicas of "
        "its own; null: apart.",
    )
    replicas: Count = Field(1, description="How many copies of the model to run.")
    scaling: ScalingConfig | None = Field(
        None, description="Let their number follow the load, from `replicas` on; null: don't. For `serve deploy`."
    )
    num_cpus: Annotated[float, Field(ge=0)] = Field(
        0, description="CPUs that Ray sets aside for a replica; 0 lets it run beside anything."
    )
    num_gpus: Annotated[float, Field(ge=0)] = Field(0, description="GPUs, or the share of one, for a replica.")
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Amounts of custom Ray resources that a replica needs, for placement."
    )

    @property
    def processes(self) -> int:
        """How many there are of the model, each with its own resources."""
        return self.replicas * self.tensor_parallel

    def spec(self, name: str) -> "ModelSpec":
        """What to load, with the path as this machine knows it."""
        from actors.loading import ModelSpec  # imports torch, which only replicas need

        return ModelSpec(
            name=name,
            path=locate(self.path),
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            safetensors_only=self.safetensors_only,
            adapter=None if self.adapter is None else locate(self.adapter),
            dtype=self.dtype,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            device=self.device,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            slots=self.slots,
            max_length=self.max_length,
            prefill_chunk=self.prefill_chunk,
            tensor_parallel=self.tensor_parallel,
            threads=self.threads,
        )


class NgramConfig(StrictModel):
    """Drafts that are looked up in the text: what followed when its last tokens came before."""

    max_tokens: Annotated[int, Field(ge=1, le=16)] = Field(4, description="The longest run of tokens to look for.")
    shared: bool = Field(False, description="Look in the endpoint's earlier answers too.")


class EndpointConfig(EnsembleConfig):
    """A name that clients ask for, and the models that answer."""

    drafter: str | None = Field(
        None, description="The model that drafts for the target, which may be one of its members; null: plain decoding."
    )
    draft_length: Annotated[int, Field(ge=0, le=32)] = Field(
        4, description="Most draft tokens that one step of the target verifies; 0: plain decoding."
    )
    ngram: NgramConfig | None = Field(None, description="Also look drafts up in the text; null: don't.")
    verification: Verification = Field(
        "coupled", description="How drafts are verified, where a request does not say: coupled or rejection."
    )
    defaults: SamplingFields = Field(
        default_factory=SamplingFields, description="Sampling parameters for requests that leave them open."
    )
    generation_config: bool = Field(
        True, description="Where neither a request nor `defaults` say, sample as the target's own configuration says."
    )
    stopping: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(
        default_factory=list,
        description="Functions, as `module:name`, that end an answer: given its token ids and text, return true.",
    )
    timeout_s: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = Field(
        None, description="Seconds until a request fails, where it does not say, 0.001 or more; null: any."
    )

    @property
    def drafts(self) -> bool:
        """Whether anything drafts for the endpoint."""
        return self.drafter is not None or self.ngram is not None


class HttpConfig(StrictModel):
    """Where to listen, and how much to take on."""

    host: Annotated[str, Field(min_length=1)] = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=1, le=65535)] = Field(8000, description="Port to listen on.")
    max_requests: Count | None = Field(
        None,
        description="Requests in progress or waiting at once; those beyond are refused with 429. null: twice as many "
        "as all targets have slots, but at least 256.",
    )
    max_tokens: Count | None = Field(
        None, description="Tokens of their prompts and answers together, as far as they may get; null: any."
    )
    max_queue_wait_s: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Predicted seconds in the queue beyond which a request is refused with 429; null: half "
        "as long as an answer takes lately, but at least 1.",
    )
    cached_tokens: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Keep answers of so many tokens, prompts included, for greedy and seeded requests that come again.",
    )
    max_body_bytes: Count = Field(
        MAX_BODY_BYTES,
        description="The largest body of a request; larger ones get 413. It may have a number, a text or another JSON "
        "value for every 32 of these bytes.",
    )
    max_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = Field(
        20, description="Of how many most probable tokens a request may ask the log-probabilities; up to 100."
    )
    max_logprobs_per_request: Count = Field(
        500_000,
        description="The most log-probabilities that all answers to a request, and its prompts, may have together.",
    )
    access_log: bool = Field(False, description="Log a line of JSON for every request, without its content.")
    tracing: TracingConfig | None = Field(
        None, description="Traces through OpenTelemetry; null: only if its environment variables ask for them."
    )
    api_keys: dict[Name, ApiKeyConfig] = Field(
        default_factory=dict, description="Who may ask, by a name for logs and metrics; without keys, anybody."
    )

    def add_key(self, name: str, key: ApiKeyConfig) -> None:
        """Let one more key in. Raises ConfigError if there is one of that name."""
        if name in self.api_keys:
            raise ConfigError(f"http.api_keys.{name}: the name is taken by a key from elsewhere; choose another")
        self.api_keys[name] = key

    def key_ring(self) -> KeyRing:
        """Who may ask. The secrets must have been digested."""
        return KeyRing(key.api_key(name) for name, key in self.api_keys.items())

    @property
    def url(self) -> str:
        """Where clients on this machine reach the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class ServerConfig(StrictModel):
    """Everything that `consort serve` needs to know."""

    models: dict[Name, ModelConfig] = Field(min_length=1, description="Models by name.")
    endpoints: dict[Name, EndpointConfig] = Field(min_length=1, description="What clients can ask for, by name.")
    http: HttpConfig = Field(default_factory=HttpConfig, description="The HTTP interface.")

    def roles(self) -> dict[str, "Role"]:
        """The role of each model that has replicas, which follows from its use."""
        return {name: role for name, role in roles_in(self.endpoints.values()).items() if not self.models[name].inside}

    def inside(self, target: str) -> dict[str, ModelConfig]:
        """The drafter inside a target's replicas, by its name, with as many slots; empty if there is none."""
        slots = self.models[target].slots
        found = {name: model for name, model in self.models.items() if model.inside == target}
        return {name: model.model_copy(update={"slots": slots}) for name, model in found.items()}


def parse_config(data: object, *, folder: Path) -> ServerConfig:
    """The configuration in a parsed YAML document. folder: what relative paths are relative to.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or the parts don't fit together; names the key.
    """
    try:
        config = ServerConfig.model_validate(data)
    except ValidationError as error:
        path, problem = problem_of(error)
        raise ConfigError(f"{path or 'the configuration'}: {problem}") from error
    check_names(config.endpoints)
    check_roles(config)
    _check_devices(config)
    _read_keys(config.http, folder)
    for name, model in config.models.items():
        model.path = _anchor(model.path, folder)
        if model.path.startswith((".", "/", "~")) and not Path(locate(model.path)).is_dir():
            raise ConfigError(f"models.{name}.path: there is no folder {model.path!r}")
    return config


def load_config(path: Path = DEFAULT_CONFIG) -> ServerConfig:
    """The configuration in a YAML file; by default, the one that serves the bundled models.

    Raises:
        ConfigError: the file can't be read, or what `parse_config` raises.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    try:
        return parse_config(data, folder=path.resolve().parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def locate(path: str) -> str:
    """A model's folder on this machine, or the path as it is if it is a Hub id or absolute.

    Folders inside the checkout are configured relative to it, because other nodes have their own copy of it.
    """
    return str(ROOT / path) if (ROOT / path).is_dir() else path


def _anchor(path: str, folder: Path) -> str:
    """A path that no longer depends on the configuration's folder or on the working directory."""
    for found in (folder / path, Path(path)):
        if found.is_dir():
            absolute = found.resolve()
            return str(absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute)
    return path


def _read_keys(http: HttpConfig, folder: Path) -> None:
    """Digest the secrets of all keys, and add the key that the environment has."""
    http.api_keys = {name: key.digested(name, folder) for name, key in http.api_keys.items()}
    if (key := environment_key()) is not None:
        http.add_key("environment", key)


def _check_devices(config: ServerConfig) -> None:
    for name, model in config.models.items():
        if model.tensor_parallel > 1 and not (model.num_cpus or model.num_gpus or model.resources):
            raise ConfigError(f"models.{name}.tensor_parallel: say in num_cpus or num_gpus what each of its devices is")
        gpus = config.models[model.inside or name].num_gpus
        if model.device.startswith(("cuda", "balanced")) and gpus == 0:
            raise ConfigError(f"models.{name}.device: is {model.device!r}, but num_gpus gives its replicas no GPU")
