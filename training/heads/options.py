"""How to make heads. Must not know the command line."""

from dataclasses import dataclass
from pathlib import Path

from engine.heads.proposer import HeadsKind
from training.distillation.loop import DistillationOptions
from training.distillation.text_stage import TargetOptions, TextOptions

VOCABULARY = 6656


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsOptions:
    """Options of heads for a target."""

    kind: HeadsKind
    target: TargetOptions
    output: Path
    work: Path
    texts: TextOptions
    distillation: DistillationOptions
    start: str | None = None  # an EAGLE-3 head to go on from: a folder or a Hub id
    layers: tuple[int, ...] | None = None  # after how many the states are read, the last included; None: three
    vocabulary: int = VOCABULARY  # tokens that new heads can draft, beside the special ones
    steps: int = 3  # of training-time test, or the number of Medusa heads
    tokens_per_step: int = 2048
    seed: int = 0
