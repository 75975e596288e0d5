"""The strategy that chooses among complete answers. Members, weights and failures are in EnsembleOptions."""

from dataclasses import dataclass
from typing import Literal

from deployments.strategies.extraction import Extract, whole_text
from deployments.strategies.utility import Utility, chrf

StrategyKind = Literal["rerank", "majority", "mbr", "best_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """The strategy of one endpoint.

    rerank: the answer that the members, or the judge, find most likely per token. majority: the most frequent extracted
    answer; with one member, self-consistency (Wang et al., arXiv 2203.11171). mbr: the answer closest to all others.
    best_of: the answer that its own member finds most likely per token.
    """

    kind: StrategyKind
    candidates: int = 4  # per member
    judge: str | None = None  # rerank: the member that scores all; None: every member does
    extract: Extract = whole_text  # majority
    utility: Utility = chrf  # mbr
