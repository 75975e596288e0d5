"""How coordinators learn which adapters were loaded at others: replicas remember for those that start later."""

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.replicas.address_query import answers_of
from deployments.replicas.names import APP_NAME

if TYPE_CHECKING:
    from deployments.endpoints.adapters import RunTimeAdapters

_PERIOD_S = 2.0  # of telling new replicas, and of asking them
_logger = logging.getLogger("ray.serve")


class AdapterExchange:
    """Keeps one coordinator's adapters like the others'."""

    def __init__(self, adapters: "RunTimeAdapters", handles: Sequence[DeploymentHandle[Any]]) -> None:
        """handles: of the models whose adapters are loaded at run time."""
        self._adapters, self._handles = adapters, handles

    async def share(self) -> None:
        """Tell the other coordinators at once, and the replicas, which remember."""
        coordinators = serve.get_deployment_handle(serve.get_replica_context().deployment, APP_NAME)
        await asyncio.gather(self._exchange(coordinators), self.sync())

    async def sync(self) -> None:
        """Learn from replicas what other coordinators have loaded, and tell replicas that are new."""
        await asyncio.gather(*map(self._exchange, self._handles))

    async def run(self) -> None:
        """Sync again and again; return if there is nothing to sync."""
        while self._handles:
            await asyncio.sleep(_PERIOD_S)
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
