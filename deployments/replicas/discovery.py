"""What a coordinator asks replicas again and again: their addresses, and adapters that were loaded at run time."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from decoding.errors import UnavailableError
from deployments.replicas.environment import APP_NAME
from deployments.replicas.model_replica import ModelReplica, ReplicaAnswer
from deployments.scaling.policy import Felt

if TYPE_CHECKING:
    from actors.wire.messages import ReplicaAddress
    from deployments.endpoints.adapters import RunTimeAdapters

_PERIOD_S = 1.0
_STARTING_PERIOD_S = 0.2  # while the model has no replica
_ADAPTERS_PERIOD_S = 2.0
_TIMEOUT_S = 2.0  # a hanging replica delays the others' answers, which must not make them look hung
_logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class ReplicaAddresses:
    """The addresses of a model's replicas that answered."""

    addresses: "Sequence[ReplicaAddress]"
    complete: bool = True  # whether all replicas answered in time


Ask = Callable[[], Awaitable[ReplicaAddresses]]
Update = Callable[["list[ReplicaAddress]", set[str]], None]


class Discovery:
    """Keeps the addresses of all live replicas up to date."""

    def __init__(self, ask: Mapping[str, Ask], update: Update) -> None:
        """
        ask: by model. Raises UnavailableError if there is no replica. After any other error, or if some replicas are
            late, the last known addresses stay.
        update: called after every poll with all addresses and the names of the replicas that have just answered, whose
            loops are therefore alive.
        """
        from actors.wire.messages import PROTOCOL

        self._ask, self._update, self._protocol = ask, update, PROTOCOL
        self._incompatible: set[str] = set()  # replicas of another version
        self._known: dict[str, list[ReplicaAddress]] = {model: [] for model in ask}

    async def poll_all(self) -> None:
        await asyncio.gather(*map(self.poll, self._ask))

    async def run(self) -> None:
        """Poll all models for ever, independently, so that a starting one delays no other."""

        async def poll_repeatedly(model: str) -> None:
            while True:
                await self.poll(model)
                await asyncio.sleep(_PERIOD_S if self._known[model] else _STARTING_PERIOD_S)

        await asyncio.gather(*map(poll_repeatedly, self._ask))

    async def poll(self, model: str) -> None:
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

    def _is_compatible(self, address: "ReplicaAddress") -> bool:
        """Whether a replica's messages can be read here, and ours there. Logs those whose can't, once."""
        if address.protocol != self._protocol and address.name not in self._incompatible:
            self._incompatible.add(address.name)
            text = "%s speaks protocol %d, not %d: left alone"
            _logger.warning(text, address.name, address.protocol, self._protocol)
        return address.protocol == self._protocol


class AddressQuery:
    """Asks a model's live replicas for their addresses. If there is none and requests wait, it lets Serve start one."""

    def __init__(
        self,
        handle: DeploymentHandle[ModelReplica],
        coordinator: str,
        held_back: Callable[[], int],
        *,
        wakes: bool,
        stands_by: Callable[[], bool] = lambda: False,
        felt: Callable[[], Felt] = Felt,
    ) -> None:
        """
        wakes: whether the model scales from 0.
        stands_by: whether the coordinator has no requests, and is to get none for now. It is not counted then.
        felt: how the model's requests fared lately.
        """
        self._handle, self._coordinator, self._held_back, self._wakes = handle, coordinator, held_back, wakes
        self._stands_by, self._felt = stands_by, felt
        self.coordinators = 1  # that ask this model's replicas
        self._call: Any = None  # a response of Serve's that waits for the first replica

    async def __call__(self) -> ReplicaAddresses:
        held_back = self._held_back()
        coordinator = None if self._stands_by() else self._coordinator
        try:
            answers, complete = await answers_of(
                self._handle.broadcast("address", coordinator, held_back, self._felt())
            )
        except DeploymentUnavailableError as error:
            self._wake(held_back)
            raise UnavailableError(str(error)) from error
        self._call = None
        answers = [answer for answer in answers if isinstance(answer, ReplicaAnswer)]
        self.coordinators = max([1, *(answer.coordinators for answer in answers)])  # 0: all stand by
        return ReplicaAddresses([answer.address for answer in answers], complete=complete)

    def _wake(self, held_back: int) -> None:
        """Make a call, which Serve's autoscaler sees waiting, or take it back."""
        if not self._wakes:
            return
        if held_back and self._call is None:
            self._call = self._handle.address.remote(self._coordinator, held_back)
        elif not held_back and self._call is not None:
            self._call.cancel()
            self._call = None


class AdapterExchange:
    """Keeps one coordinator's adapters like the others'. Replicas remember them for coordinators that start later."""

    def __init__(self, adapters: "RunTimeAdapters", handles: Sequence[DeploymentHandle[Any]]) -> None:
        self._adapters, self._handles = adapters, handles

    async def share(self) -> None:
        await asyncio.gather(self._exchange(coordinators()), self.sync())

    async def sync(self) -> None:
        """Learn from replicas what other coordinators have loaded, and tell replicas that are new."""
        await asyncio.gather(*map(self._exchange, self._handles))

    async def run(self) -> None:
        """Sync again and again; return if there is nothing to sync."""
        while self._handles:
            await asyncio.sleep(_ADAPTERS_PERIOD_S)
            await self.sync()

    async def _exchange(self, handle: DeploymentHandle[Any]) -> None:
        try:
            answers, _ = await answers_of(handle.broadcast("merge_adapters", self._adapters.changes))
        except DeploymentUnavailableError:  # it has no replica yet
            return
        except Exception:  # an error of the control plane; the next exchange comes soon
            _logger.warning("could not exchange adapters", exc_info=True)
            return
        for changes in answers:
            self._adapters.merge(changes)


def coordinators() -> DeploymentHandle[Any]:
    """Return the handle of all coordinators, the calling one included."""
    return serve.get_deployment_handle(serve.get_replica_context().deployment, APP_NAME)


async def answers_of(response: DeploymentBroadcastResponse) -> tuple[list[Any], bool]:
    """Return the replicas' answers, and whether all came in time. Those that raised an error are left out."""
    # The public `results_async` loses all answers if one is late.
    results = await asyncio.wait_for(response._fetch_replica_results_async(), _TIMEOUT_S)
    waits = (asyncio.wait_for(result.get_async(), _TIMEOUT_S) for result in results)
    answers = await asyncio.gather(*waits, return_exceptions=True)
    complete = not any(isinstance(answer, TimeoutError) for answer in answers)
    return [answer for answer in answers if not isinstance(answer, BaseException)], complete
