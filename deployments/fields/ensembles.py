"""Fields of ensembles: how an endpoint's members answer together, and how they are blended."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from decoding.blending.params import BlendKind, BlendParams, ContrastiveForm, EnsembleOptions
from decoding.errors import InvalidRequestError
from deployments.fields.strict import StrictModel

_DEFAULTS = BlendParams()
_MAX_MEMBERS = 64


class BlendFields(StrictModel):
    """Settings of a blend. null: in a request the endpoint's value, in an endpoint the default."""

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
        None, description=f"contrastive, scaled: how strongly the amateur is subtracted; {_DEFAULTS.beta} unless set."
    )
    amateur_temperature: float | None = Field(
        None,
        description="contrastive, difference: of the amateur's distribution; "
        f"{_DEFAULTS.amateur_temperature} unless set.",
    )


class EnsembleFields(StrictModel):
    """Ensemble fields of a request. null means the endpoint's value."""

    weights: Annotated[list[float], Field(min_length=1, max_length=_MAX_MEMBERS)] | None = Field(
        None, description="Weight of each member of the ensemble, in order."
    )
    blend: BlendFields | None = Field(
        None,
        description="How the members are blended: `kind`, `threshold`, `form`, `alpha`, `beta`, `amateur_temperature`.",
    )
    min_members: Annotated[int, Field(ge=1, le=_MAX_MEMBERS)] | None = Field(
        None, description="With fewer members the request fails."
    )
    member_timeout_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="How long a member may take for a step, or for all its candidates."
    )
    on_member_failure: Literal["fail", "drop"] | None = Field(
        None, description="When a member fails: `fail`, or go on with the others (`drop`)."
    )
    return_members: bool | None = Field(
        None, description="false: leave out members' contributions, also to each token in `return_token_details`."
    )

    def override_ensemble(
        self, options: EnsembleOptions, *, model: str, count: int, blends: bool
    ) -> EnsembleOptions | None:
        """Return the endpoint's options with the request's changes; None if it changes nothing.

        Raises InvalidRequestError if a value is out of range or doesn't apply to the model.

        model: the endpoint's name.
        count: number of members; 0: none.
        blends: whether members are blended token by token.
        """
        given = [name for name in EnsembleFields.model_fields if getattr(self, name) is not None]
        changes = [name for name in given if name != "return_members"]
        if not changes:
            return None
        if count < 1:
            raise InvalidRequestError(f"{changes[0]}: the model {model!r} has no members.", field=changes[0])
        if self.blend is not None and not blends:
            raise InvalidRequestError(f"blend: the model {model!r} does not blend its members.", field="blend")
        if self.min_members is not None and self.min_members > count:
            reason = f"min_members: should be at most {count}, the number of members of the model {model!r}."
            raise InvalidRequestError(reason, field="min_members")
        return self._apply(options, count)

    def _apply(self, options: EnsembleOptions, count: int) -> EnsembleOptions:
        fields: dict[str, Any] = {} if self.blend is None else self.blend.model_dump(exclude_none=True)
        if self.weights is not None:
            fields["weights"] = tuple(self.weights)
        try:
            blend = replace(options.blend, **fields)
            blend.require_members(count)
            blend.require_vocabulary(options.vocabulary)
        except InvalidRequestError as error:
            field = error.field if error.field == "weights" else f"blend.{error.field}"
            raise InvalidRequestError(str(error), field=field) from error
        timeout_s = options.member_timeout_s if self.member_timeout_ms is None else self.member_timeout_ms / 1e3
        return replace(
            options,
            blend=blend,
            on_member_failure=self.on_member_failure or options.on_member_failure,
            min_members=self.min_members or options.min_members,
            member_timeout_s=timeout_s,
        )
