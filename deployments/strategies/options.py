"""Which strategy chooses among whole answers, and with what. Members, weights and failures: EnsembleOptions."""

from dataclasses import dataclass
from typing import Literal

from deployments.strategies.extraction import Extract, whole_text
from deployments.strategies.utility import Utility, chrf

StrategyKind = Literal["rerank", "majority", "mbr", "best_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOptions:
    """Of one endpoint.

    rerank: what the members, or the judge, find most likely per token. majority: what most extracted answers say;
    self-consistency (Wang et al., arXiv 2203.11171) if there is one member. mbr: what is closest to all others.
    best_of: what its own member finds most likely per token.
    """

    kind: StrategyKind
    candidates: int = 4  # of each member
    judge: str | None = None  # rerank: the member that scores all; None: every member does
    extract: Extract = whole_text  # majority
    utility: Utility = chrf  # mbr
