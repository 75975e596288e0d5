"""The configuration of an endpoint: the models that answer, and what requests leave open."""

from typing import Annotated

from pydantic import Field

from decoding.sampling.params import Verification
from deployments.configuration.ensembles import EnsembleConfig
from deployments.requests.fields import MIN_TIMEOUT_S
from deployments.requests.sampling_fields import SamplingFields
from deployments.validation.strict import StrictModel


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
