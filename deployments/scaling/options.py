"""The configuration of a model whose number of replicas follows the load."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deployments.scaling.policy import ScalingRules
from deployments.validation.strict import StrictModel, wrong_field


class ScalingConfig(StrictModel):
    """How many replicas a model has when their number follows the load: see docs/scaling.md."""

    min: Annotated[int, Field(ge=0)] = Field(1, description="The fewest replicas. Drafters can do with 0.")
    max: Annotated[int, Field(ge=1)] = Field(description="The most replicas.")
    up_delay_s: Annotated[float, Field(ge=0)] = Field(10, description="Seconds for which more must have been needed.")
    down_delay_s: Annotated[float, Field(ge=0)] = Field(
        120, description="Seconds for which fewer must have been enough."
    )
    look_back_s: Annotated[float, Field(gt=10)] = Field(20, description="Seconds over which loads are averaged.")
    use: Annotated[float, Field(gt=0, le=1)] = Field(
        0.75, description="Of targets: the share of the slots to have in use; above it, one more replica."
    )
    least_use: Annotated[float, Field(gt=0, le=1)] = Field(
        0.6, description="Of targets: replicas go only where fewer would use no more of their slots than that."
    )
    most_lag: Annotated[float, Field(ge=0, le=1)] = Field(
        0.15, description="Of drafters: the share of their time that targets may wait for drafts; above it, one more."
    )
    least_lag: Annotated[float, Field(ge=0, le=1)] = Field(
        0.03, description="Of drafters: where targets wait less than that, one fewer is tried."
    )
    probe_period_s: Annotated[float, Field(gt=0)] = Field(
        600, description="Of drafters: where none pays, one is tried so often; what was learnt is forgotten after that."
    )

    def rules(self, role: Literal["target", "drafter", "both"], targets: Sequence[str]) -> ScalingRules:
        """What the policy goes by: a model in both roles follows the use of its slots, as targets do.

        targets: of a drafter, the deployments that it drafts for.
        """
        return ScalingRules(
            "drafter" if role == "drafter" else "target",
            self.use,
            self.least_use,
            self.most_lag,
            self.least_lag,
            self.probe_period_s,
            list(targets),
        )

    @model_validator(mode="after")
    def _in_order(self) -> "ScalingConfig":
        for least, most in (("min", "max"), ("least_use", "use"), ("least_lag", "most_lag")):
            if getattr(self, least) > getattr(self, most):
                raise wrong_field(least, f"should be at most {most}, which is {getattr(self, most):g}")
        return self
