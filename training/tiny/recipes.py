"""Sizes, training mixes and seeds of the bundled models."""

from dataclasses import dataclass
from typing import Literal

from training.tiny.stream import MEMBER_MIX, TARGET_MIX, Mix

Name = Literal["target", "member", "drafter"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Size, training mix and seed of one bundled model."""

    hidden: int
    layers: int
    intermediate: int
    kv_heads: int
    mix: Mix
    seed: int


RECIPES: dict[Name, Recipe] = {
    "target": Recipe(hidden=256, layers=6, intermediate=704, kv_heads=2, mix=TARGET_MIX, seed=1),
    "member": Recipe(hidden=256, layers=6, intermediate=704, kv_heads=2, mix=MEMBER_MIX, seed=2),
    "drafter": Recipe(hidden=192, layers=2, intermediate=320, kv_heads=3, mix=TARGET_MIX, seed=3),
}
