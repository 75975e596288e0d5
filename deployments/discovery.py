"""Finds the replicas that are up, again and again, and tells the coordinator. Knows Serve only as functions to ask."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from actors.wire.addresses import ReplicaAddress
from decoding.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Answers:
    """Of a model's replicas, asked where they can be reached."""

    addresses: Sequence[ReplicaAddress]
    complete: bool = True  # whether all answered in time


Ask = Callable[[], Awaitable[Answers]]
Found = Callable[[list[ReplicaAddress], set[str]], None]

_PERIOD_S = 1.0
_STARTING_PERIOD_S = 0.2  # while the model has no replica
_logger = logging.getLogger(__name__)


class Discovery:
    """Asks every model's deployment for the addresses of its live replicas."""

    def __init__(self, ask: Mapping[str, Ask], found: Found) -> None:
        """
        ask: by model. May raise UnavailableError if there is no replica. After any other error, and while some take
            too long to answer, the last known ones stay.
        found: gets the addresses of all models' replicas after every look, and the names of those that have just
            answered: an answer is a replica's word that its loop is well.
        """
        self._ask = ask
        self._found = found
        self._known: dict[str, list[ReplicaAddress]] = {model: [] for model in ask}

    async def look_at_all(self) -> None:
        """Ask every model's deployment once."""
        await asyncio.gather(*map(self.look, self._ask))

    async def run(self) -> None:
        """Follow all models for ever, each by itself, so that one which is starting holds up no other."""
        await asyncio.gather(*(self._follow(model) for model in self._ask))

    async def _follow(self, model: str) -> None:
        while True:
            await self.look(model)
            await asyncio.sleep(_PERIOD_S if self._known[model] else _STARTING_PERIOD_S)

    async def look(self, model: str) -> None:
        """Ask one model's deployment once."""
        answered: set[str] = set()
        try:
            answers = await self._ask[model]()
            answered = {address.name for address in answers.addresses}
            silent = [] if answers.complete else [one for one in self._known[model] if one.name not in answered]
            self._known[model] = [*answers.addresses, *silent]
        except UnavailableError:
            self._known[model] = []
        except Exception:  # a hiccup of the control plane must not end streams: the last known replicas stay
            _logger.warning("could not ask for the replicas of %s", model, exc_info=True)
        self._found([address for addresses in self._known.values() for address in addresses], answered)
