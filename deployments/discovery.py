"""Poll the deployments for their live replicas, for the coordinator. Knows Serve only as functions to call."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from actors.wire.addresses import PROTOCOL, ReplicaAddress
from decoding.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class ReplicaAddresses:
    """The addresses of a model's replicas that answered."""

    addresses: Sequence[ReplicaAddress]
    complete: bool = True  # whether all replicas answered in time


Ask = Callable[[], Awaitable[ReplicaAddresses]]
Update = Callable[[list[ReplicaAddress], set[str]], None]

_PERIOD_S = 1.0
_STARTING_PERIOD_S = 0.2  # while the model has no replica
_logger = logging.getLogger(__name__)


class Discovery:
    """Keeps the addresses of all live replicas up to date."""

    def __init__(self, ask: Mapping[str, Ask], update: Update) -> None:
        """
        ask: by model. Raises UnavailableError if there is no replica. After any other error, or if some replicas are
            late, the last known addresses stay.
        update: called after every poll with all addresses and the names of the replicas that have just answered, whose
            loops are therefore alive.
        """
        self._ask = ask
        self._update = update
        self._incompatible: set[str] = set()  # replicas of another version
        self._known: dict[str, list[ReplicaAddress]] = {model: [] for model in ask}

    async def poll_all(self) -> None:
        """Ask every model's deployment once."""
        await asyncio.gather(*map(self.poll, self._ask))

    async def run(self) -> None:
        """Poll all models for ever, independently, so that a starting one delays no other."""
        await asyncio.gather(*(self._poll_repeatedly(model) for model in self._ask))

    async def _poll_repeatedly(self, model: str) -> None:
        while True:
            await self.poll(model)
            await asyncio.sleep(_PERIOD_S if self._known[model] else _STARTING_PERIOD_S)

    async def poll(self, model: str) -> None:
        """Ask one model's deployment once."""
        answered: set[str] = set()
        try:
            answers = await self._ask[model]()
            compatible = list(filter(self._is_compatible, answers.addresses))
            answered = {address.name for address in compatible}
            silent = [] if answers.complete else [known for known in self._known[model] if known.name not in answered]
            self._known[model] = [*compatible, *silent]
        except UnavailableError:
            self._known[model] = []
        except Exception:  # a control-plane error must not end streams
            _logger.warning("could not ask for the replicas of %s", model, exc_info=True)
        self._update([address for addresses in self._known.values() for address in addresses], answered)

    def _is_compatible(self, address: ReplicaAddress) -> bool:
        """Whether a replica's messages can be read here, and ours there. Logs those whose can't, once."""
        if address.protocol != PROTOCOL and address.name not in self._incompatible:
            self._incompatible.add(address.name)
            _logger.warning("%s speaks protocol %d, not %d: left alone", address.name, address.protocol, PROTOCOL)
        return address.protocol == PROTOCOL
