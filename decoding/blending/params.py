"""Options of an ensemble: how members are blended, their weights, and what happens if one fails."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from decoding.errors import UnavailableError, require

BlendKind = Literal["single", "mixture", "product", "vote", "gated", "contrastive"]
BlendRule = Literal[BlendKind, "formula"]
ContrastiveForm = Literal["difference", "scaled"]
VocabularyKind = Literal["shared", "union", "topk_union"]

MAX_BETA = 100
MIN_AMATEUR_TEMPERATURE, MAX_AMATEUR_TEMPERATURE = 0.001, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendParams:
    """How the members' distributions become the target distribution; see decoding/blending/blend.py.

    The first member leads: it is the model of `single`, the gate of `gated`, the expert of `contrastive`, and what
    decides in a `formula` which tokens are plausible. The second member is the amateur of `contrastive`.

    Raises InvalidRequestError if a value is out of range; the error names the field.
    """

    kind: BlendRule = "mixture"
    weights: tuple[float, ...] = ()  # one per member, of any sum; formula: of any sign; empty: equal weights
    threshold: float = 0.5  # gated: other members count where the gate's best token is less probable
    form: ContrastiveForm = "difference"
    alpha: float = 0.1  # contrastive, formula: tokens need this share of the leader's best probability; 0: all stay
    beta: float = 0.5  # contrastive, scaled: how strongly the amateur is subtracted
    amateur_temperature: float = 1.0  # contrastive, difference

    def __post_init__(self) -> None:
        kinds, forms, weights = get_args(BlendRule), get_args(ContrastiveForm), self.weights
        low, high = MIN_AMATEUR_TEMPERATURE, MAX_AMATEUR_TEMPERATURE
        signed = self.kind == "formula"
        fit = all(math.isfinite(weight) and (signed or weight >= 0) for weight in weights)
        sound = fit and (not weights or (any(weights) and sum(map(abs, weights)) < math.inf))
        for name, holds, expected in (
            ("kind", self.kind in kinds, f"one of {', '.join(kinds)}"),
            ("form", self.form in forms, " or ".join(forms)),
            ("weights", sound, f"finite numbers{'' if signed else ' of at least 0'}, not all of them 0"),
            ("threshold", 0 <= self.threshold <= 1, "a number from 0 to 1"),
            ("alpha", 0 <= self.alpha <= 1, "a number from 0 (all tokens stay) to 1"),
            ("beta", 0 <= self.beta <= MAX_BETA, f"a number from 0 to {MAX_BETA}"),
            ("amateur_temperature", low <= self.amateur_temperature <= high, f"a number from {low} to {high}"),
        ):
            require(holds, name, getattr(self, name), expected)

    def contrast(self, present: Sequence[bool]) -> tuple[float, float]:
        """Return α, 0 where no token is implausible, and the temperature of members with negative weights."""
        contrasts = self.kind == "contrastive"
        decides = self.kind == "formula" or (contrasts and all(self.weights))
        cools = contrasts and self.form == "difference"
        return self.alpha if decides and all(present) else 0.0, self.amateur_temperature if cools else 1.0

    def require_members(self, count: int) -> None:
        """Check the parameters against the number of members, M.

        Raises InvalidRequestError if these members can't be blended so; the error names the field.
        """
        weights = self.weights
        require(not weights or len(weights) == count, "weights", weights, f"one number for each of {count} members")
        if self.kind == "contrastive":
            require(
                count == 2, "kind", self.kind, f"a blend for {count} members; contrastive has an expert, an amateur"
            )
            require(
                not weights or (weights[0] > 0 and weights[1] in (0, weights[0])),
                "weights",
                weights,
                "(1, 1), or (1, 0) for the expert alone; beta says how much the amateur counts",
            )
        if self.kind == "single":
            require(not any(weights[1:]), "weights", weights, "0 for all but the first member")

    def require_vocabulary(self, vocabulary: VocabularyKind) -> None:
        """Check the parameters against the vocabulary on which members are blended.

        Raises InvalidRequestError if they don't fit; the error names the field.
        """
        unfit = {
            "product": "rule out each token that one of the members lacks",
            "contrastive": "prefer each token that the amateur lacks to all others",
        }
        require(
            vocabulary != "union" or self.kind not in unfit,
            "kind",
            self.kind,
            f"another one with vocabulary: union, where it would {unfit.get(self.kind)}; topk_union gives such tokens "
            f"the probability of how the member begins to write them",
        )

    def member_weights(self, present: Sequence[bool]) -> tuple[float, ...]:
        """Return the weight of each member, [M]; 0 for those that are absent.

        Weights that are all positive keep their sum, which is 1 except in formulas. Where some are negative, the leader
        stands alone once a member is lost.

        Args:
            present: [M] whether the member answered.

        Raises:
            InvalidRequestError: these members can't be blended so; the error names the field.
            UnavailableError: all present members have weight 0, or the leader of a contrast is absent.
        """
        self.require_members(len(present))
        given = self._given(len(present))
        weights = [weight if is_present else 0.0 for weight, is_present in zip(given, present, strict=True)]
        contrasts = min(given) < 0
        if not any(weights) or (contrasts and not present[0]):
            names = ", ".join(str(i) for i, is_present in enumerate(present) if is_present)
            raise UnavailableError(f"A {self.kind} blend with weights {given} needs more than members [{names}].")
        if contrasts:
            return given if weights == list(given) else (1.0,) + (0.0,) * (len(given) - 1)
        scale = (sum(given) if self.kind == "formula" else 1.0) / sum(weights)
        return tuple(weight * scale for weight in weights)

    def _given(self, count: int) -> tuple[float, ...]:
        """Return the weights with which members enter the mean or the sum, if all are there."""
        weights, alone = self.weights or (1.0,) * count, (1.0,) + (0.0,) * (count - 1)
        if self.kind == "single" or (self.kind == "contrastive" and not weights[1]):
            return alone
        if self.kind == "contrastive":
            return (1 + self.beta, -self.beta) if self.form == "scaled" else (1.0, -1.0)
        return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleOptions:
    """Options of one request. Raises InvalidRequestError if a value is out of range; the error names the field."""

    blend: BlendParams = field(default_factory=BlendParams)
    on_member_failure: Literal["fail", "drop"] = "fail"
    min_members: int = 1  # leader included; with fewer members the request always fails
    member_timeout_s: float = 30.0  # maximum time of a member's reply
    member_dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the members' logits in messages
    member_top_k: int = 0  # number of logits per position in messages; 0: all
    report_contributions: bool = False  # whether to report each member's contribution to each token
    vocabulary: VocabularyKind = "shared"  # tokens on which members are blended
    vocabulary_top_k: int = 10  # topk_union: candidates of each member

    def __post_init__(self) -> None:
        require(self.min_members >= 1, "min_members", self.min_members, "a whole number of at least 1")
        require(self.member_top_k >= 0, "member_top_k", self.member_top_k, "a whole number from 0 (all)")
        require(
            self.blend.kind not in ("contrastive", "formula") or self.member_top_k == 0,
            "blend.kind",
            self.blend.kind,
            "another one unless member_top_k is 0 (it would prefer tokens that a member does not send)",
        )
        require(self.vocabulary_top_k >= 1, "vocabulary_top_k", self.vocabulary_top_k, "a whole number of at least 1")
        timeout_ms = 1e3 * self.member_timeout_s
        require(0 < timeout_ms < math.inf, "member_timeout_ms", timeout_ms, "more than 0")

    @property
    def best_count(self) -> int:
        """Number of each member's most probable tokens that are candidates; 0: all tokens are."""
        return self.vocabulary_top_k if self.vocabulary == "topk_union" else 0

    def has_quorum(self, present: Sequence[bool]) -> bool:
        """Whether enough members are present to start or to go on. present: [M]"""
        return all(present) or (self.on_member_failure == "drop" and sum(present) >= self.min_members)
