"""What takes part in a comparison, and what it tells about a turn. Knows nothing of how the comparison is run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from actors.coordinator.request import Statistics
from actors.loops.thread import LoopTimes
from benchmarks.peers.hosts import Pausable
from benchmarks.peers.workload import Workload

Kind = Literal[
    "hf", "hf-assisted", "vllm", "alternation", "plain", "fixed", "adaptive", "inside"
]  # from "plain" on, ours


@dataclass(frozen=True, slots=True)
class Activity:
    """What a contestant that tells so did: how speculation went, and where the time of its models went."""

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
        group, how: its name. Contestants of one group and kind differ in their draft length only.
        hosts: what has to run while the contestant does, and is paused otherwise.
        draft_length: γ; None where there is none, or where it is not constant.
        """
        self.group, self.kind, self.hosts, self.draft_length = group, kind, hosts, draft_length
        self.name = f"{group}, {how}"

    def takes_part(self, workload: Workload) -> bool:
        """Whether the contestant can do this at all."""
        return True

    def run(self, workload: Workload) -> list[list[int]]:
        """The answers, one per prompt, as token ids. This is what is timed."""
        raise NotImplementedError

    def activity(self) -> Activity:
        """What happened since the last call."""
        return Activity()
