"""Blend parameters of a request, and the weights of its members. Knows nothing of batches or tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from decoding.errors import UnavailableError, require

BlendKind = Literal["single", "mixture", "product", "vote", "gated", "contrastive"]
ContrastiveForm = Literal["difference", "scaled"]
VocabularyKind = Literal["shared", "union", "topk_union"]

MAX_BETA = 100
MIN_AMATEUR_TEMPERATURE, MAX_AMATEUR_TEMPERATURE = 0.001, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendParams:
    """How the members' distributions become the target distribution; see decoding/blending/blend.py.

    The first member leads: it is the model of `single`, the gate of `gated` and the expert of `contrastive`. The second
    member is the amateur of `contrastive`.

    Raises:
        InvalidRequestError: a value is out of range; the error names the field.
    """

    kind: BlendKind = "mixture"
    weights: tuple[float, ...] = ()  # one per member, of any sum; empty: equal weights
    threshold: float = 0.5  # gated: other members count where the gate's best token is less probable
    form: ContrastiveForm = "difference"
    alpha: float = 0.1  # contrastive: tokens need this share of the expert's best probability; 0: all stay
    beta: float = 0.5  # contrastive, scaled: how strongly the amateur is subtracted
    amateur_temperature: float = 1.0  # contrastive, difference

    def __post_init__(self) -> None:
        require(self.kind in get_args(BlendKind), "kind", self.kind, f"one of {', '.join(get_args(BlendKind))}")
        forms = get_args(ContrastiveForm)
        require(self.form in forms, "form", self.form, " or ".join(forms))
        require(
            all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
            and (not self.weights or 0 < sum(self.weights) < math.inf),
            "weights",
            self.weights,
            "finite numbers of at least 0, not all of them 0",
        )
        require(0 <= self.threshold <= 1, "threshold", self.threshold, "a number from 0 to 1")
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "a number from 0 (all tokens stay) to 1")
        require(0 <= self.beta <= MAX_BETA, "beta", self.beta, f"a number from 0 to {MAX_BETA}")
        require(
            MIN_AMATEUR_TEMPERATURE <= self.amateur_temperature <= MAX_AMATEUR_TEMPERATURE,
            "amateur_temperature",
            self.amateur_temperature,
            f"a number from {MIN_AMATEUR_TEMPERATURE} to {MAX_AMATEUR_TEMPERATURE}",
        )

    def require_members(self, count: int) -> None:
        """Check the parameters against the number of members, M.

        Raises:
            InvalidRequestError: these members can't be blended so; the error names the field.
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

        Raises:
            InvalidRequestError: they don't fit; the error names the field.
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
        """Return the weight of each member, [M], normalised over the members that are present.

        A contrastive expert and its amateur weigh a half each; without the amateur, the expert has weight 1.

        Args:
            present: [M] whether the member answered.

        Raises:
            InvalidRequestError: these members can't be blended so; the error names the field.
            UnavailableError: all present members have weight 0, or a contrastive expert is absent.
        """
        self.require_members(len(present))
        given = self.weights or (1.0,) * len(present)
        if self.kind == "single":
            given = (1.0,) + (0.0,) * (len(present) - 1)
        weights = [weight if is_present else 0.0 for weight, is_present in zip(given, present, strict=True)]
        total = sum(weights)
        if total == 0 or (self.kind == "contrastive" and not present[0]):
            names = ", ".join(str(i) for i, is_present in enumerate(present) if is_present)
            raise UnavailableError(f"A {self.kind} blend with weights {given} needs more than members [{names}].")
        return tuple(weight / total for weight in weights)
