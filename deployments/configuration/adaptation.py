"""The configuration of a drafter's online adaptation. Loads nothing."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from actors.adaptation.adaptation import AdaptationOptions


class AdaptationConfig(StrictModel):
    """How a drafter learns from the texts that it drafts for (docs/training.md)."""

    texts: Annotated[int, Field(ge=8, le=100_000)] = Field(
        256, description="The most recent texts to learn from, in memory; a quarter only tells whether it helps."
    )
    update_after: Annotated[int, Field(ge=1)] = Field(32, description="New texts before the next round of learning.")
    learning_rate: Annotated[float, Field(gt=0, le=0.1)] = Field(5e-4, description="Of AdamW.")

    def options(self) -> "AdaptationOptions":
        """Return what a replica starts its learner with."""
        from actors.adaptation.adaptation import AdaptationOptions  # not before a replica needs it
        from training import adaptation

        return AdaptationOptions(module=adaptation.__name__, **self.model_dump())
