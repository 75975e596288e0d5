"""The configuration of a model: what is loaded, the resources of each replica, and how many there are."""

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PrivateAttr, model_validator

from deployments.configuration.paths import locate
from deployments.configuration.values import Count, CountOrAuto, Name
from deployments.fields.strict import StrictModel, wrong_field

if TYPE_CHECKING:
    from actors.loops.adaptation import AdaptationOptions
    from engine.loading.checkpoint import ModelSpec

MAX_LENGTH = 32_768  # tokens of a request where the configuration names no other number

_TRAINING = __name__.rpartition("deployments")[0] + "training"  # beside this package, in a wheel, too


class AdaptationConfig(StrictModel):
    """How a drafter learns from the texts that it drafts for (docs/training.md)."""

    learning_rate: float = Field(5e-4, gt=0, le=0.1, description="Of AdamW.")

    def options(self) -> "AdaptationOptions":
        from actors.loops.adaptation import AdaptationOptions  # not before a replica needs it

        return AdaptationOptions(module=f"{_TRAINING}.adaptation", **self.model_dump())


class ScalingConfig(StrictModel):
    """Bounds and thresholds for scaling by load (docs/scaling.md)."""

    min: int = Field(1, ge=0, description="Fewest replicas. A target with 0 starts once requests wait for it.")
    max: int = Field(ge=1, description="Most replicas.")
    up_delay_s: float = Field(
        10, ge=0, description="Seconds for which more replicas must be wanted before one is added."
    )
    down_delay_s: float = Field(
        120, ge=0, description="Seconds for which fewer replicas must suffice before one is removed."
    )
    target_utilization: float = Field(
        0.75, gt=0, le=1, description="For targets: the share of slots to keep in use; above it, a replica is added."
    )

    ttft_ms: float | None = Field(
        None, gt=0, description="For targets: add one while first tokens take longer, at the 90th percentile."
    )
    tokens_per_s: float | None = Field(
        None, gt=0, description="For targets: add one while streams are slower, at the 10th percentile."
    )

    @model_validator(mode="after")
    def _check_order(self) -> "ScalingConfig":
        if self.min > self.max:
            raise wrong_field("min", f"should be at most max, which is {self.max}")
        return self


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
        description="LoRA weights that requests choose by `model`: by name, a folder or an id on the Hub. For a "
        "drafter: what it applies to such requests, by the names of its target's.",
    )
    adapters_at_run_time: int = Field(
        0,
        ge=0,
        description="How many more of them an admin may load while the server runs; 0: none. For a drafter: how many "
        "that come with such ones it may hold.",
    )
    weights_at_run_time: bool = Field(
        False, description="Whether a key with `weights` may replace its weights while the server runs."
    )
    max_adapter_rank: int = Field(
        16, ge=1, le=512, description="The largest rank of these `adapters`, for which memory is reserved."
    )
    chat_template: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Chat template: a file, or its text; null: the checkpoint's. One without tools gets a place for "
        "them, in the form of Hermes.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the weights; auto: as in the checkpoint."
    )
    quantization: Literal["int4", "int8", "nf4"] | None = Field(
        None,
        description="int4, int8: weights as integers with a scale for each 32; embeddings and the output layer always "
        "have 8 bits. nf4: as int4, with 4-bit normal floats for integers.",
    )
    activations: Literal["int8"] | None = Field(
        None,
        description="int8: where weights are integers and a CPU computes, round what they are multiplied with to 8 "
        "bits, too; faster and less exact. null: keep it in `dtype`.",
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
        None, description="Scale with the load, starting at `replicas`; null: don't. Needs `serve deploy`."
    )
    num_cpus: float = Field(
        0, ge=0, description="CPUs that Ray reserves for a replica; 0: none, so it can run on any node."
    )
    num_gpus: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="GPUs, or the fraction of one, for a replica; 0: it runs on the CPU. null: a GPU of its own where "
        "there is one, targets and members before drafters.",
    )
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict, description="Custom Ray resources that a replica needs, by name, for placement."
    )

    @property
    def adapter_slots(self) -> int:
        return len(self.adapters) + self.adapters_at_run_time

    @property
    def can_have_adapters(self) -> bool:
        """Whether its layers are whole, on one device, and do not change."""
        return self.tensor_parallel == 1 and self.device != "balanced" and self.adaptation is None

    @property
    def processes(self) -> int:
        return self.replicas * self.tensor_parallel

    @property
    def unpacks(self) -> bool:
        """Whether weights that are stored quantised are unpacked, because they will change or are on several GPUs."""
        changes = self.quantization, self.adapter, self.adaptation
        return self.device == "balanced" or any(change is not None for change in changes)

    _early_exits: tuple[int, ...] = PrivateAttr(())

    def note_early_exits(self, layers: Collection[int]) -> None:
        """Note after which layers formulas of its endpoints read what it predicts."""
        self._early_exits = tuple(sorted(layers))

    def spec(self, name: str) -> "ModelSpec":
        from engine.loading.checkpoint import ModelSpec  # imports torch, which only replicas have to

        shared = {field.name for field in fields(ModelSpec)} & set(type(self).model_fields)
        return ModelSpec(
            name=name,
            path=locate(self.path),
            adapter=None if self.adapter is None else locate(self.adapter),
            adapters={name: locate(path) for name, path in self.adapters.items()},
            unpacked=self.adaptation is not None,
            early_exits=self._early_exits,
            memory_bytes=None if self.memory_gib is None else int(self.memory_gib * 2**30),
            **self.model_dump(include=shared - {"path", "adapter", "adapters"}),
        )
