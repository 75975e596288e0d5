"""Fields of formulas: weighted sums of log-probabilities, of several prompts and models."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from deployments.fields.conversation import Message
from deployments.fields.strict import StrictModel, Text, wrong_field
from deployments.fields.types import GivenPrompt, Items

FormulaKind = Literal["guidance", "context_aware", "proxy", "contrastive", "dola", "average"]

_MOST_TERMS = 8
_LARGEST = 100.0
_SCALES: Mapping[str | None, float] = {"guidance": 1.5, "context_aware": 0.5, "proxy": 1.0, "contrastive": 0.5}
_KEYS: Mapping[str | None, Sequence[str]] = {  # of each kind, those that it needs first
    None: ("terms", "alpha"),
    "guidance": ("scale", "negative_prompt", "alpha"),
    "context_aware": ("scale", "alpha"),
    "proxy": ("expert", "anti_expert", "scale", "alpha"),
    "contrastive": ("amateur", "scale", "alpha"),
    "dola": ("layers", "alpha"),
    "average": ("models",),
}
_REQUIRED: Mapping[str | None, int] = {None: 1, "proxy": 2, "contrastive": 1, "dola": 1, "average": 1}
Layers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=16)]
_Factor = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class TermFields(StrictModel):
    """A term of a formula. With a weight alone it is what the target makes of the request's own prompt."""

    always_strict = True

    weight: _Factor = Field(description="By which its log-probabilities count; below 0 they are subtracted.")
    model: Text | None = Field(None, description="Another model that the endpoint names; null: the target.")
    prompt: GivenPrompt | None = Field(None, description="A text or token ids, read in place of the request's prompt.")
    messages: Annotated[Items[Message], Field(min_length=1)] | None = Field(
        None, description="A conversation, read in place of the request's."
    )
    system: Text | None = Field(
        None, description="A system message: the request's conversation is read with it, in place of its own."
    )
    without: Literal["system", "documents", "prompt"] | None = Field(
        None,
        description="What is left out: `system`, the system messages of the conversation; `documents`; or `prompt`, "
        "all of the prompt but its last token.",
    )

    layers: Layers | None = Field(
        None,
        description="What the target predicts after so many of its layers, such as [8]; of several, the one that "
        "differs most from the last at a position. The endpoint's `formula` says which there are.",
    )

    @property
    def change(self) -> str:
        """The key by which its prompt differs from the request's; empty: it doesn't."""
        return next((key for key in ("prompt", "messages", "system", "without") if getattr(self, key) is not None), "")

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        keys = [key for key in ("prompt", "messages", "system", "without", "layers") if getattr(self, key) is not None]
        if len(keys) > 1:
            raise wrong_field(keys[1], f"has no place beside {keys[0]}; set one of them")
        return self


class FormulaFields(StrictModel):
    """A weighted sum of log-probabilities, by its terms or by a name from the literature."""

    always_strict = True

    kind: FormulaKind | None = Field(
        None,
        description="guidance, context_aware, proxy, contrastive, dola or average, whose terms follow from other keys; "
        "null: `terms`.",
    )
    terms: Annotated[list[TermFields], Field(min_length=1, max_length=_MOST_TERMS)] | None = Field(
        None, description="What is added up; the first term is the target's own, with the request's prompt."
    )
    alpha: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Tokens stay from this share of the first term's best probability on; 0: all. By default 0.1 for "
        "contrastive and dola, else 0.",
    )
    scale: _Factor | None = Field(
        None,
        description="How strongly the terms differ. Unless set: guidance 1.5, proxy 1, context_aware, contrastive 0.5.",
    )
    negative_prompt: GivenPrompt | None = Field(
        None,
        description="guidance: what to lead away from: a prompt or, in a conversation, a system message; null: the "
        "last token of the prompt, or the conversation without system message.",
    )
    expert: Text | None = Field(None, description="proxy: the small model that was tuned.")
    anti_expert: Text | None = Field(None, description="proxy: the same model before that.")
    amateur: Text | None = Field(None, description="contrastive: the weaker model.")
    layers: Layers | None = Field(
        None, description="dola: the earlier layers to contrast with, as in a term, such as [0, 2, 4, 6]."
    )
    models: Annotated[list[Text], Field(min_length=1, max_length=_MOST_TERMS - 1)] | None = Field(
        None, description="average: the other models."
    )

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        keys = _KEYS[self.kind]
        for name in type(self).model_fields:
            if name not in (*keys, "kind") and getattr(self, name) is not None:
                raise wrong_field(name, f"is not for {self.kind or 'terms'}; its keys are {', '.join(keys)}")
        for name in keys[: _REQUIRED.get(self.kind, 0)]:
            if getattr(self, name) is None:
                raise wrong_field(name, "is required" if self.kind else "is required, or else kind")
        first = self.terms[0] if self.terms else None
        if first and (first.model, first.change, first.layers) != (None, "", None):
            problem = "should be the request's own prompt, a term with a weight alone, which may be 0"
            raise wrong_field("terms.0", problem)
        return self

    @property
    def least_share(self) -> float:
        return (0.1 if self.kind in ("contrastive", "dola") else 0.0) if self.alpha is None else self.alpha

    @property
    def read_layers(self) -> set[int]:
        """The layers of the target whose predictions it needs."""
        return {*(self.layers or ()), *(layer for term in self.terms or () for layer in term.layers or ())}

    @property
    def named_models(self) -> Iterator[tuple[str, str]]:
        """The keys that name other models, and these."""
        if self.terms:
            yield from ((f"terms.{index}.model", term.model) for index, term in enumerate(self.terms) if term.model)
        for key in ("expert", "anti_expert", "amateur"):
            if (model := getattr(self, key)) is not None:
                yield key, model
        yield from ((f"models.{index}", model) for index, model in enumerate(self.models or ()))

    def expanded(self, *, chat: bool) -> list[TermFields]:
        """Return all terms, the request's own first. chat: whether the request is a conversation."""
        scale = _SCALES.get(self.kind, 1.0) if self.scale is None else self.scale
        match self.kind:
            case "guidance":
                negative = self._negative(1 - scale, chat=chat)
                return [TermFields(weight=scale), negative]
            case "context_aware":
                return [TermFields(weight=1 + scale), TermFields(weight=-scale, without="documents")]
            case "proxy":
                experts = TermFields(weight=scale, model=self.expert), TermFields(weight=-scale, model=self.anti_expert)
                return [TermFields(weight=1.0), *experts]
            case "contrastive":
                return [TermFields(weight=1 + scale), TermFields(weight=-scale, model=self.amateur)]
            case "dola":
                return [TermFields(weight=1.0), TermFields(weight=-1.0, layers=self.layers)]
            case "average":
                weight = 1 / (1 + len(self.models or ()))
                return [
                    TermFields(weight=weight),
                    *(TermFields(weight=weight, model=name) for name in self.models or ()),
                ]
        return self.terms or []

    def _negative(self, weight: float, *, chat: bool) -> TermFields:
        if self.negative_prompt is None:
            return TermFields(weight=weight, without="system" if chat else "prompt")
        if chat and isinstance(self.negative_prompt, str):
            return TermFields(weight=weight, system=self.negative_prompt)
        return TermFields(weight=weight, prompt=self.negative_prompt)


class FormulaRequestFields(StrictModel):
    """Fields of a request that has a formula."""

    formula: FormulaFields | None = Field(
        None,
        description="A weighted sum of log-probabilities to sample from, in place of the endpoint's: `kind`, or "
        "`terms` and `alpha`.",
    )
    guidance_scale: _Factor | None = Field(
        None, description="Classifier-free guidance (arXiv 2306.17806), as `formula` with the kind guidance; 1: off."
    )
    negative_prompt: GivenPrompt | None = Field(
        None, description="What guidance leads away from, as `formula.negative_prompt`; with a scale of 1.5 unless set."
    )

    @property
    def formula_field(self) -> str:
        """The field that asks for the formula."""
        given = (name for name in ("negative_prompt", "guidance_scale") if getattr(self, name) is not None)
        return next(given, "formula")

    def formula_conditions(self) -> list[tuple[bool, str, str]]:
        """Conditions on the fields: whether each holds, the field that is wrong if not, and the problem."""
        return [
            (self.formula is None or self.guidance_scale is None, "guidance_scale", "has no place beside formula"),
            (self.formula is None or self.negative_prompt is None, "negative_prompt", "has no place beside formula"),
        ]

    def wanted_formula(self, default: FormulaFields | None) -> FormulaFields | None:
        """Return the formula of the request; None: it has none. default: the endpoint's."""
        given: dict[str, Any] = {"scale": self.guidance_scale, "negative_prompt": self.negative_prompt}
        changes = {name: value for name, value in given.items() if value is not None}
        if self.formula is not None or not changes:
            return self.formula or default
        guides = default is not None and default.kind == "guidance"
        formula = (
            default.model_copy(update=changes) if default and guides else FormulaFields(kind="guidance", **changes)
        )
        return None if formula.scale == 1 else formula
