"""The configuration of heads on a target's hidden states."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from deployments.configuration.paths import locate
from deployments.configuration.values import Name
from deployments.fields.strict import StrictModel, wrong_field
from engine.heads.spec import HeadsSpec

if TYPE_CHECKING:
    from deployments.configuration.model import ModelConfig


class HeadsConfig(StrictModel):
    """Heads on the target's hidden states, which draft in its replicas."""

    path: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="A folder, relative to the configuration's own folder; or an id on the Hugging Face Hub. null: "
        "the target's own checkpoint, for mtp only.",
    )
    kind: Literal["medusa", "eagle3", "mtp", "dflash", "pard", "self"] = Field(
        description="medusa, eagle3, mtp, dflash, pard, or self: LoRA weights by which the target drafts for itself."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        None,
        description="eagle3, dflash: after how many layers the target's hidden states are read, such as [2, 16, 29]; "
        "null: as the checkpoint says.",
    )
    tree: Annotated[list[list[Annotated[int, Field(ge=0, le=15)]]], Field(min_length=1)] | None = Field(
        None,
        description="medusa: a static tree, as paths of ranks such as [[0], [1], [0, 0]]; null: the tokens most "
        "probably accepted, by measured rates.",
    )
    min_acceptance: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2,
        description="Refuse heads if fewer of their first draft tokens are the target's own, on its own text; 0: don't "
        "test them.",
    )
    adapters: dict[Name, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=dict,
        description="eagle3, mtp: LoRA weights that they apply to requests with an adapter of the target, by its name.",
    )

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if (self.path is None) != (self.kind == "mtp"):
            problem = (
                "comes with the target; remove the key" if self.path else f"is missing: {self.kind} heads are files"
            )
            raise wrong_field("path", problem)
        return self

    def spec(self, endpoint: str, target: "ModelConfig") -> HeadsSpec:
        source = self if self.path is not None else target
        values = self.model_dump() | {"path": locate(source.path or ""), "revision": source.revision}
        slots = {name: slot for slot, name in enumerate(target.adapters, 1)}
        values["adapters"] = {slots[name]: locate(path) for name, path in self.adapters.items()}
        if self.takes_adapters and (self.adapters or target.adapters_at_run_time):
            values |= {"adapter_slots": target.adapter_slots, "max_adapter_rank": target.max_adapter_rank}
        return HeadsSpec(name=f"endpoints.{endpoint}.heads", **values)

    @property
    def takes_adapters(self) -> bool:
        return self.kind in ("eagle3", "mtp")

    def __str__(self) -> str:
        if self.kind == "self":
            return f"itself, by the adapter {self.path}"
        return "the MTP layer of its checkpoint" if self.path is None else f"{self.kind} heads {self.path}"
