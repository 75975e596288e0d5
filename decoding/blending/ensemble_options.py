"""Options of an ensemble: how members are blended, and what happens if one fails. Knows nothing of tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from decoding.blending.params import BlendParams, VocabularyKind
from decoding.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleOptions:
    """Options of one request.

    Raises:
        InvalidRequestError: a value is out of range; the error names the field.
    """

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
            self.blend.kind != "contrastive" or self.member_top_k == 0,
            "blend.kind",
            self.blend.kind,
            "another one unless member_top_k is 0 (it would prefer tokens that the amateur does not send)",
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
