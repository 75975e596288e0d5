"""The roles of a replica, and the loop of each."""

from typing import Literal

from actors.drafter.loop import Drafter
from actors.loops.options import LoopOptions
from actors.replica.shared_weights import SharedWeightsLoop
from actors.verifier.loop import Target
from actors.wire.link import ConnectingLink
from engine.model.runner import Runner

Role = Literal["target", "drafter", "both"]
Loop = Target | Drafter | SharedWeightsLoop


def make_loop(role: Role, runner: Runner, link: ConnectingLink, options: LoopOptions = LoopOptions()) -> Loop:
    """Return the loop of that role. With the role "both", a shared-weight copy of the runner drafts."""
    match role:
        case "target":
            return Target(runner, link, options)
        case "drafter":
            return Drafter(runner, link, options)
        case "both":
            return SharedWeightsLoop(runner, link, options)
