"""Contestants of a comparison, and their activity. Must not know how a comparison is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.coordinator.request import Statistics
from actors.loops.thread import LoopTimes
from benchmarks.peers.hosts import Pausable
from benchmarks.peers.workload import Workload

# From "plain" on, Consort.
Kind = Literal["hf", "hf-assisted", "vllm", "alternation", "plain", "fixed", "adaptive", "colocated"]


@dataclass(frozen=True, slots=True)
class Activity:
    """Statistics of speculation, and the times of the models' loops; zeros if a contestant does not report them."""

    statistics: Statistics = field(default_factory=Statistics)
    target: LoopTimes = field(default_factory=LoopTimes)
    drafter: LoopTimes = field(default_factory=LoopTimes)

    def __add__(self, other: "Activity") -> "Activity":
        return Activity(self.statistics + other.statistics, self.target + other.target, self.drafter + other.drafter)


class Contestant:
    """One way to answer prompts."""

    def __init__(
        self, group: str, how: str, kind: Kind, hosts: Sequence[Pausable] = (), *, draft_length: int | None = None
    ) -> None:
        """
        group, how: the name. Contestants of one group and kind differ only in their draft length.
        hosts: processes that run while the contestant does, and are paused otherwise.
        draft_length: γ; None if there is none, or if it is not constant.
        """
        self.group, self.kind, self.hosts, self.draft_length = group, kind, hosts, draft_length
        self.name = f"{group}, {how}"

    def takes_part(self, workload: Workload) -> bool:
        """Whether the contestant can run the workload."""
        return True

    def run(self, workload: Workload) -> list[list[int]]:
        """Return the answers, one per prompt, as token ids. The comparison times this call."""
        raise NotImplementedError

    def activity(self) -> Activity:
        """Return the activity since the last call."""
        return Activity()
