"""The configuration of an endpoint: its models, and the defaults of its requests."""

from typing import Annotated

from pydantic import Field

from decoding.sampling.params import Verification
from deployments.configuration.ensembles import EnsembleConfig
from deployments.requests.fields import MIN_TIMEOUT_S
from deployments.requests.sampling_fields import SamplingFields
from deployments.validation.strict import StrictModel


class NgramConfig(StrictModel):
    """Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last tokens."""

    max_tokens: Annotated[int, Field(ge=1, le=16)] = Field(4, description="The longest run of tokens to look up.")
    shared: bool = Field(False, description="Look in the endpoint's earlier answers, too.")


class EndpointConfig(EnsembleConfig):
    """A name that clients send as `model`, and the models that answer."""

    drafter: str | None = Field(
        None, description="The model that drafts for the target, which may be one of its members; null: plain decoding."
    )
    draft_length: Annotated[int, Field(ge=0, le=32)] = Field(
        4, description="Most draft tokens that one step of the target verifies; 0: plain decoding."
    )
    compressor: str | None = Field(
        None,
        description="The small model whose probabilities `prompt_compression` uses, which may be the drafter; null: "
        "prompts can't be compressed.",
    )
    ngram: NgramConfig | None = Field(None, description="Also draft by lookup in the text; null: don't.")
    verification: Verification = Field(
        "coupled", description="How drafts are verified by default: coupled or rejection."
    )
    defaults: SamplingFields = Field(
        default_factory=SamplingFields, description="Default sampling parameters of requests."
    )
    generation_config: bool = Field(
        True,
        description="Use the target's own sampling parameters where neither a request nor `defaults` set them.",
    )
    stopping: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(
        default_factory=list,
        description="Functions, as `module:name`, that get an answer's token ids and text and return true to end it.",
    )
    timeout_s: Annotated[float, Field(ge=MIN_TIMEOUT_S)] | None = Field(
        None, description="Default seconds until a request fails, 0.001 or more; null: no limit."
    )

    @property
    def drafts(self) -> bool:
        """Whether anything drafts for the endpoint."""
        return self.drafter is not None or self.ngram is not None
