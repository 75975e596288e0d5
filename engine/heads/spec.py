"""Which heads a target gets. Without torch, for what plans and deploys them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

HeadsKind = Literal["medusa", "eagle3", "mtp", "dflash", "pard", "self"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """Heads of a target."""

    name: str  # the configuration's key, for error texts
    path: str  # a local folder or a Hub id
    kind: HeadsKind
    revision: str | None = None
    layers: Sequence[int] | None = (
        None  # EAGLE-3, DFlash: after how many layers the target's states are read; None: its own
    )
    tree: Sequence[Sequence[int]] | None = None  # Medusa: paths of ranks to draft; None: by measured probability
    min_acceptance: float = 0.2  # of the first draft token on the target's own text; 0: not tested
    adapters: Mapping[int, str] = field(default_factory=dict)  # paths, by the slot of the target's
    adapter_slots: int = 0  # the target's; 0: the heads take no adapters
    max_adapter_rank: int = 16
