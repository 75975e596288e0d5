"""Settings of a blend, for endpoints and requests. Knows nothing of members."""

from pydantic import Field

from decoding.blending.params import BlendKind, BlendParams, ContrastiveForm
from deployments.validation.strict import StrictModel

_DEFAULTS = BlendParams()


class BlendFields(StrictModel):
    """Settings of a blend. null means the endpoint's value in a request, the default in an endpoint."""

    always_strict = True

    kind: BlendKind | None = Field(
        None,
        description="mixture (weighted mean of probabilities; the default), product (of log-probabilities), vote, "
        "gated, single, or contrastive.",
    )
    threshold: float | None = Field(
        None,
        description="gated: the others are asked where the leader's best token is less probable; "
        f"{_DEFAULTS.threshold} unless set.",
    )
    form: ContrastiveForm | None = Field(
        None,
        description="contrastive: difference (arXiv 2210.15097) or scaled (arXiv 2309.09117); "
        f"{_DEFAULTS.form} unless set.",
    )
    alpha: float | None = Field(
        None,
        description="contrastive: tokens stay from this share of the expert's best probability on; "
        f"{_DEFAULTS.alpha} unless set.",
    )
    beta: float | None = Field(
        None,
        description=f"contrastive, scaled: how strongly the amateur is subtracted; {_DEFAULTS.beta} unless set.",
    )
    amateur_temperature: float | None = Field(
        None,
        description="contrastive, difference: of the amateur's distribution; "
        f"{_DEFAULTS.amateur_temperature} unless set.",
    )
