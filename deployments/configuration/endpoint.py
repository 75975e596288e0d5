"""The configuration of an endpoint: its models, and the defaults of its requests."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from decoding.sampling.params import Verification
from deployments.configuration.ensembles import EnsembleConfig
from deployments.configuration.model import locate
from deployments.requests.fields import MIN_TIMEOUT_S
from deployments.requests.sampling_fields import SamplingFields
from deployments.validation.strict import StrictModel

if TYPE_CHECKING:
    from engine.heads.spec import HeadsSpec


class NgramConfig(StrictModel):
    """Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last tokens."""

    max_tokens: Annotated[int, Field(ge=1, le=16)] = Field(4, description="The longest run of tokens to look up.")
    shared: bool = Field(
        False, description="Look in earlier answers of the same replica, too: of all endpoints that share theirs."
    )


class HeadsConfig(StrictModel):
    """Heads on the target's hidden states, which draft in its replicas."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="A folder, relative to the configuration's own folder; or an id on the Hugging Face Hub."
    )
    kind: Literal["medusa", "eagle3"] = Field(description="medusa or eagle3.")
    revision: str | None = Field(None, description="Branch, tag or commit on the Hub.")
    layers: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = Field(
        None,
        description="eagle3: after how many layers the target's hidden states are read, such as [2, 16, 29]; null: as "
        "the checkpoint says.",
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

    def spec(self, endpoint: str) -> "HeadsSpec":
        """Return what a replica loads, with the path on this machine."""
        from engine.heads.spec import HeadsSpec

        values = self.model_dump() | {"path": locate(self.path)}
        return HeadsSpec(name=f"endpoints.{endpoint}.heads", **values)


class EndpointConfig(EnsembleConfig):
    """A name that clients send as `model`, and the models that answer."""

    drafter: str | None = Field(
        None, description="The model that drafts for the target, which may be one of its members; null: no drafter."
    )
    draft_length: Annotated[int, Field(ge=0, le=32)] = Field(
        4, description="Most draft tokens that one step of the target verifies; 0: plain decoding."
    )
    compressor: str | None = Field(
        None,
        description="The small model by which `prompt_compression` shortens, which may be the drafter; null: "
        "prompts can't be compressed.",
    )
    ngram: NgramConfig | None = Field(None, description="Also draft by lookup in the text; null: don't.")
    heads: HeadsConfig | None = Field(
        None, description="Also draft by heads on the target's hidden states, in its replicas; null: don't."
    )
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
        return self.drafter is not None or self.ngram is not None or self.heads is not None
