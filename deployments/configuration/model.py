"""The configuration of a model. Knows nothing of endpoints; loads nothing."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, TypeAdapter, WrapValidator, model_validator

from deployments.scaling.options import ScalingConfig
from deployments.validation.renamed_keys import rename_keys
from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from actors.loading.checkpoint import ModelSpec

ROOT = Path(__file__).resolve().parents[2]

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
    colocated_with: str | None = Field(
        None,
        description="For a drafter: the target whose replicas run it. Both alternate on the same device. null: the "
        "drafter has replicas of its own.",
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

    @model_validator(mode="before")
    @classmethod
    def _accept_old_keys(cls, data: object) -> object:
        return rename_keys(data, {"inside": "colocated_with"})

    @property
    def processes(self) -> int:
        """How many there are of the model, each with its own resources."""
        return self.replicas * self.tensor_parallel

    def spec(self, name: str) -> "ModelSpec":
        """What to load, with the path as this machine knows it."""
        from actors.loading.checkpoint import ModelSpec  # imports torch, which only replicas need

        shared = {field.name for field in fields(ModelSpec)} & set(type(self).model_fields)
        return ModelSpec(
            name=name,
            path=locate(self.path),
            adapter=None if self.adapter is None else locate(self.adapter),
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            **self.model_dump(include=shared - {"path", "adapter"}),
        )


def locate(path: str) -> str:
    """A model's folder on this machine, or the path as it is if it is a Hub id or absolute.

    Folders inside the checkout are configured relative to it, because other nodes have their own copy of it.
    """
    return str(ROOT / path) if (ROOT / path).is_dir() else path
