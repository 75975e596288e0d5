"""The configuration of a model's scaling by load."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deployments.scaling.policy import ScalingRules
from deployments.validation.renamed_keys import rename_keys
from deployments.validation.strict import StrictModel, wrong_field

_RENAMED = {
    "use": "target_utilization",
    "least_use": "scale_down_below",
    "most_lag": "max_draft_lag",
    "least_lag": "min_draft_lag",
}
_ORDERED = (("min", "max"), ("scale_down_below", "target_utilization"), ("min_draft_lag", "max_draft_lag"))


class ScalingConfig(StrictModel):
    """Bounds and thresholds for scaling by load (docs/scaling.md)."""

    min: Annotated[int, Field(ge=0)] = Field(
        1, description="Fewest replicas. A target with 0 starts once requests wait for it."
    )
    max: Annotated[int, Field(ge=1)] = Field(description="Most replicas.")
    up_delay_s: Annotated[float, Field(ge=0)] = Field(
        10, description="Seconds for which more replicas must be wanted before one is added."
    )
    down_delay_s: Annotated[float, Field(ge=0)] = Field(
        120, description="Seconds for which fewer replicas must suffice before one is removed."
    )
    look_back_s: Annotated[float, Field(gt=10)] = Field(20, description="Seconds over which the load is averaged.")
    target_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.75, description="For targets: the share of slots to keep in use; above it, a replica is added."
    )
    scale_down_below: Annotated[float, Field(gt=0, le=1)] = Field(
        0.6, description="For targets: a replica goes only if the others would use at most this share of their slots."
    )
    max_draft_lag: Annotated[float, Field(ge=0, le=1)] = Field(
        0.15,
        description="For drafters: the share of time that targets may wait for drafts; above it, a replica is added.",
    )
    min_draft_lag: Annotated[float, Field(ge=0, le=1)] = Field(
        0.03, description="For drafters: if targets wait for a smaller share of time, one replica fewer is tried."
    )
    probe_period_s: Annotated[float, Field(gt=0)] = Field(
        600,
        description="For drafters: seconds between trials of one where none pays; older measurements are ignored.",
    )

    def rules(self, role: Literal["target", "drafter", "both"], targets: Sequence[str]) -> ScalingRules:
        """Return the rules for the policy. A model in both roles scales as targets do.

        targets: for a drafter, the deployments it drafts for.
        """
        return ScalingRules(
            "drafter" if role == "drafter" else "target",
            self.target_utilization,
            self.scale_down_below,
            self.max_draft_lag,
            self.min_draft_lag,
            self.probe_period_s,
            list(targets),
        )

    @model_validator(mode="before")
    @classmethod
    def _accept_old_keys(cls, data: object) -> object:
        return rename_keys(data, _RENAMED)

    @model_validator(mode="after")
    def _check_order(self) -> "ScalingConfig":
        for low, high in _ORDERED:
            if getattr(self, low) > getattr(self, high):
                raise wrong_field(low, f"should be at most {high}, which is {getattr(self, high):g}")
        return self
