"""Asks a model's replicas for their addresses."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from decoding.errors import UnavailableError
from deployments.replicas.model_replica import ModelReplica, ReplicaAnswer

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentBroadcastResponse

    from deployments.discovery import ReplicaAddresses

_TIMEOUT_S = 2.0  # a hanging replica delays the others' answers, which must not make them look hung


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
    ) -> None:
        """
        wakes: whether the model scales from 0.
        stands_by: whether the coordinator has no requests, and is to get none for now. It is not counted then.
        """
        self._handle, self._coordinator, self._held_back, self._wakes = handle, coordinator, held_back, wakes
        self._stands_by = stands_by
        self.coordinators = 1  # that ask this model's replicas
        self._call: Any = None  # a response of Serve's that waits for the first replica

    async def __call__(self) -> "ReplicaAddresses":
        """Return the addresses; raises what `deployments.discovery.Discovery` expects."""
        from deployments.discovery import ReplicaAddresses

        held_back = self._held_back()
        coordinator = None if self._stands_by() else self._coordinator
        try:
            answers, complete = await answers_of(self._handle.broadcast("address", coordinator, held_back))
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


async def answers_of(response: "DeploymentBroadcastResponse") -> tuple[list[Any], bool]:
    """Return the replicas' answers, and whether all came in time. Those that raised an error are left out."""
    # The public `results_async` loses all answers if one is late.
    results = await asyncio.wait_for(response._fetch_replica_results_async(), _TIMEOUT_S)
    waits = (asyncio.wait_for(result.get_async(), _TIMEOUT_S) for result in results)
    answers = await asyncio.gather(*waits, return_exceptions=True)
    complete = not any(isinstance(answer, TimeoutError) for answer in answers)
    return [answer for answer in answers if not isinstance(answer, BaseException)], complete
