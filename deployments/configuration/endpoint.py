"""The configuration of an endpoint: its models, how they answer together, and the defaults of its requests."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from decoding.blending.params import BlendKind, BlendParams, EnsembleOptions, VocabularyKind
from decoding.errors import InvalidRequestError
from decoding.sampling.params import Verification
from deployments.configuration.heads import HeadsConfig
from deployments.configuration.templates import TemplateSource
from deployments.fields.ensembles import BlendFields
from deployments.fields.formulas import FormulaFields
from deployments.fields.sampling import TOKEN_ID_FIELDS, SamplingFields
from deployments.fields.strict import StrictModel, nearest, wrong_field
from deployments.fields.types import MIN_TIMEOUT_S

StrategyKind = Literal["rerank", "majority", "mbr", "best_of", "synthesize"]
EndpointKind = Literal["plain", "speculative", "ensemble", "contrastive"]

MAX_CANDIDATES = 128  # of all members together: `mbr` compares every pair
_STEP_TIMEOUT_MS = 30_000.0
_ANSWER_TIMEOUT_MS = 600_000.0
_KINDS: Mapping[str, tuple[EndpointKind, ...]] = {  # of the endpoints that a key is for
    "target": ("plain", "speculative"),
    "members": ("ensemble",),
    "expert": ("contrastive",),
    "amateur": ("contrastive",),
    "strategy": ("ensemble",),
    "formula": ("plain", "speculative"),
}
_REQUIRED = ("target", "expert", "amateur")  # by all endpoints of these kinds


class BlendConfig(BlendFields):
    """How the members' distributions are combined into one."""

    weights: list[float] = Field(
        default_factory=list, description="The weight of each member, in the order of the members; equal by default."
    )

    def params(self, kind: BlendKind) -> BlendParams:
        """Return the decoder's parameters; raises InvalidRequestError if a value is out of range. kind: the default."""
        fields: dict[str, Any] = self.model_dump(exclude_none=True)
        return BlendParams(**{"kind": kind, **fields, "weights": tuple(self.weights)})


class StrategyConfig(StrictModel):
    """How several complete answers become one."""

    kind: StrategyKind = Field(
        description="rerank: the answer the members find most likely; majority: the most frequent extracted answer; "
        "mbr: the answer closest to the others (minimum Bayes risk); best_of: the one its own member finds most "
        "likely; synthesize: a new one, which the writer makes of all."
    )
    candidates: int = Field(4, ge=1, le=64, description="Answers that each member proposes; synthesize: 1 unless set.")
    judge: str | None = Field(
        None, description="rerank: the member that scores all candidates; null: all members do, by their weights."
    )
    regex: str | None = Field(
        None,
        description="majority: a regular expression (RE2) whose last match, or its first group, is the answer; "
        "null: the whole text.",
    )
    json_field: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="majority: the answer is this field, as `a.b`, of the last JSON object that has it."
    )
    utility: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = Field(
        None,
        description="mbr: a function, as `module:name`, that scores a candidate's text against a reference text; null: "
        "chrF.",
    )
    writer: str | None = Field(
        None,
        description="synthesize: the model that writes the answer, a member or another one; null: the first member.",
    )
    template: TemplateSource | None = Field(
        None,
        description="synthesize: what the writer reads, in Jinja, with the variables `prompt` and `answers`; null: "
        "Consort's own.",
    )

    @model_validator(mode="after")
    def _keys_fit_the_kind(self) -> Self:
        kinds = {"judge": "rerank", "regex": "majority", "json_field": "majority", "utility": "mbr"}
        kinds |= {"writer": "synthesize", "template": "synthesize"}
        for name, kind in kinds.items():
            if name in self.model_fields_set and getattr(self, name) is not None and self.kind != kind:
                raise wrong_field(name, f"is for {kind}, not for {self.kind}")
        if self.regex is not None and self.json_field is not None:
            raise wrong_field("json_field", "can't be combined with regex; set one of them")
        if self.kind == "synthesize" and "candidates" not in self.model_fields_set:
            self.candidates = 1
        return self


class NgramConfig(StrictModel):
    """Drafts by prompt lookup: the tokens that followed an earlier occurrence of the last tokens."""

    max_tokens: int = Field(4, ge=1, le=16, description="The longest run of tokens to look up.")


class CorpusConfig(StrictModel):
    """Drafts copied from the prompts and answers of earlier requests."""

    path: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="A folder, relative to the configuration's own folder, where replicas keep these texts for later "
        "ones; null: nowhere.",
    )
    max_tokens: int = Field(
        1_000_000,
        ge=1024,
        le=100_000_000,
        description="The most tokens that a replica keeps, 20 bytes each; the oldest are forgotten.",
    )


class EndpointConfig(StrictModel):
    """A name that clients send as `model`, and the models that answer: a target, or members that it leads."""

    kind: EndpointKind | None = Field(
        None, description="plain, speculative, ensemble or contrastive; null: follows from the other keys."
    )
    target: str = Field("", description="The model whose text is served, if there are no members.")
    members: list[str] = Field(
        default_factory=list, description="ensemble: the models that answer together, the leader first."
    )
    expert: str | None = Field(None, description="contrastive: the model whose text is served.")
    amateur: str | None = Field(None, description="contrastive: the weaker model, whose mistakes are penalised.")
    blend: BlendConfig = Field(
        default_factory=BlendConfig, description="How the members' distributions are combined, token by token."
    )
    formula: FormulaFields | None = Field(
        None,
        description="plain, speculative: a weighted sum of log-probabilities, of other prompts and models, too; null: "
        "the target's own.",
    )
    strategy: StrategyConfig | None = Field(
        None,
        description="ensemble: choose among complete answers of the members, or write one from them; null: blend the "
        "members token by token.",
    )
    on_member_failure: Literal["fail", "drop"] = Field(
        "fail", description="If a member fails: fail the request, or drop the member and go on with the others."
    )
    min_members: int = Field(1, ge=1, description="With fewer members the request fails in any case.")
    member_timeout_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="Time limit of a member for a step (null: 30 s), or for all its candidates (null: 600 s)."
    )
    member_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Widest type in which the members' logits are sent."
    )
    member_top_k: int = Field(
        0, ge=0, description="How many logits per position are sent; 0: all, as topk_union and contrastive blends need."
    )
    vocabulary: VocabularyKind = Field(
        "shared",
        description="Tokens on which members are blended: shared (one vocabulary), union (each tokenizes the text "
        "itself, over all tokens), or topk_union (the same, over the 10 most probable tokens of each).",
    )
    drafter: str | None = Field(
        None, description="The model that drafts for the target, which may be one of its members; null: no drafter."
    )
    draft_length: int = Field(
        4, ge=0, le=32, description="Most draft tokens that one step of the target verifies; 0: plain decoding."
    )
    compressor: str | None = Field(
        None,
        description="The small model by which `prompt_compression` shortens, which may be the drafter; null: "
        "prompts can't be compressed.",
    )
    ngram: NgramConfig | None = Field(None, description="Also draft by lookup in the text; null: don't.")
    corpus: CorpusConfig | None = Field(
        None, description="Also draft by lookup in the texts of earlier requests with the same target; null: don't."
    )
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
        True, description="Use the target's own sampling parameters where neither a request nor `defaults` set them."
    )
    stopping: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(
        default_factory=list,
        description="Functions, as `module:name`, that get an answer's token ids and text and return true to end it.",
    )
    timeout_s: float | None = Field(
        None, ge=MIN_TIMEOUT_S, description="Default seconds until a request fails, 0.001 or more; null: no limit."
    )

    @model_validator(mode="after")
    def _members_fit_together(self) -> Self:
        self.kind = self.kind or self._implied_kind()
        for key, kinds in _KINDS.items():
            if getattr(self, key) and self.kind not in kinds:
                raise wrong_field(key, f"is not for an endpoint of the kind {self.kind}")
            if not getattr(self, key) and self.kind in kinds and key in _REQUIRED:
                raise wrong_field(key, "is required")
        for holds, field, problem in self._conditions():
            if not holds:
                raise wrong_field(field, problem)
        if self.kind == "contrastive":
            self.target = self.expert or ""
        elif self.kind == "ensemble":
            self.target = (self.strategy and self.strategy.writer) or self.members[0]
        try:
            self.ensemble_options()
        except InvalidRequestError as error:
            raise wrong_field(f"blend.{error.field}", str(error)) from error
        return self

    def _implied_kind(self) -> EndpointKind:
        if self.expert or self.amateur:
            return "contrastive"
        return "ensemble" if self.members else "speculative" if self.drafts else "plain"

    def _conditions(self) -> list[tuple[bool, str, str]]:
        """Return each condition with the key to blame and the problem if it does not hold."""
        ensemble, contrastive = self.kind == "ensemble", self.kind == "contrastive"
        sums = self.formula is not None and bool(self.others)
        alone = not (ensemble or contrastive or sums)
        min_models = 1 if self.strategy else 2
        total = len(self.members) * (self.strategy.candidates if self.strategy else 0)
        judge = self.strategy.judge if self.strategy else None
        others = nearest(judge or "", self.members)
        return [
            (not ensemble or len(self.members) >= min_models, "members", f"should name at least {min_models}"),
            (len(set(self.members)) == len(self.members), "members", "should all differ"),
            (not contrastive or self.expert != self.amateur, "amateur", "should differ from the expert"),
            (not contrastive or self.blend.kind in (None, "contrastive"), "blend.kind", "should be contrastive here"),
            (total <= MAX_CANDIDATES, "strategy.candidates", f"are {total} in all; at most {MAX_CANDIDATES} are taken"),
            (
                not (self.synthesizes and self.blend.weights),
                "blend.weights",
                "have no effect: all answers count the same",
            ),
            (not (self.synthesizes and self.compressor), "compressor", "is not for prompts that several models read"),
            (judge is None or judge in self.members, "strategy.judge", f"is not among the members; {others}"),
            (self.kind != "plain" or not self.drafts, "kind", "is plain, but the endpoint has drafts"),
            (self.kind != "speculative" or self.drafts, "kind", "is speculative, but the endpoint has no drafts"),
            (
                self.vocabulary == "shared" or (not alone and self.strategy is None),
                "vocabulary",
                f"is {self.vocabulary}, which is for members that are blended token by token",
            ),
            (
                self.vocabulary != "topk_union" or self.member_top_k == 0,
                "member_top_k",
                "should be 0 with vocabulary: topk_union, which needs each member's logits of the others' tokens",
            ),
            (
                not (sums or "contrastive" in (self.kind, self.blend.kind)) or self.member_top_k == 0,
                "member_top_k",
                "should be 0 with a formula or a contrastive blend, which would prefer each token that a member did "
                "not send to all others",
            ),
            (
                not sums or self.vocabulary != "union",
                "vocabulary",
                "should be shared or topk_union with a formula, which would rule out each token that a model lacks",
            ),
            (alone or self.min_members <= len(self.models), "min_members", "are more than there are members"),
        ]

    @property
    def drafts(self) -> bool:
        return any(each is not None for each in (self.drafter, self.ngram, self.corpus, self.heads))

    @property
    def synthesizes(self) -> bool:
        return self.strategy is not None and self.strategy.kind == "synthesize"

    @property
    def others(self) -> list[str]:
        """Members, or terms of a formula, that work in the target's tokens."""
        if self.synthesizes:
            return []
        if self.formula is not None:
            return [*dict.fromkeys(model for _, model in self.formula.named_models if model != self.target)]
        return [self.amateur] if self.amateur is not None else self.members[1:]

    @property
    def through_text(self) -> list[str]:
        """The members whose vocabulary may differ from the leader's."""
        return [] if self.vocabulary == "shared" else self.others

    @property
    def models(self) -> list[str]:
        """All members, the leader first; without members, the target."""
        return (
            [self.expert or "", *self.others]
            if self.expert is not None
            else self.members or [self.target, *self.others]
        )

    @property
    def answering(self) -> list[str]:
        """All members, and a writer that is none of them."""
        return list(dict.fromkeys([*self.models, self.target]))

    def of_member(self, model: str, drafting: "EndpointConfig | None") -> "EndpointConfig":
        """Return the endpoint as which a member answers before others write. drafting: whose drafts it has, if any."""
        defaults = self.defaults.model_copy(update=dict.fromkeys(TOKEN_ID_FIELDS))
        alone: dict[str, Any] = {"target": model, "members": [], "strategy": None, "defaults": defaults}
        alone["kind"] = "plain" if drafting is None else "speculative"
        drafts = {key: drafting and getattr(drafting, key) for key in ("drafter", "ngram", "corpus", "heads")}
        length = self.draft_length if drafting is None else drafting.draft_length
        return self.model_copy(update={**alone, **drafts, "draft_length": length})

    def named_models(self) -> list[tuple[str, str]]:
        if self.kind == "contrastive":
            answering = [("expert", self.expert), ("amateur", self.amateur)]
        else:
            answering = [("members", model) for model in self.members] or [("target", self.target)]
        if self.formula is not None:
            answering += [(f"formula.{key}", model) for key, model in self.formula.named_models]
        writer = None if self.strategy is None else self.strategy.writer
        named = [*answering, ("strategy.writer", writer), ("drafter", self.drafter), ("compressor", self.compressor)]
        return [(key, model) for key, model in named if model is not None]

    def ensemble_options(self) -> EnsembleOptions:
        """Return the decoder's options; raises InvalidRequestError if a value is out of range."""
        blend = self.blend.params("contrastive" if self.kind == "contrastive" else "mixture")
        if self.kind in ("ensemble", "contrastive"):
            blend.require_members(len(self.models))
            blend.require_vocabulary(self.vocabulary)
        default_ms = _STEP_TIMEOUT_MS if self.strategy is None else _ANSWER_TIMEOUT_MS
        return EnsembleOptions(
            blend=blend,
            on_member_failure=self.on_member_failure,
            min_members=self.min_members,
            member_timeout_s=(self.member_timeout_ms or default_ms) / 1e3,
            member_dtype=self.member_dtype,
            member_top_k=self.member_top_k,
            vocabulary=self.vocabulary,
        )
