"""How an endpoint's requests are answered: by its models at once, or by a choice among whole answers."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from actors.coordinator.request import Delta, Request
from deployments.configuration.key_ring import ANYBODY, ApiKey
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.strategies.deliberation import Deliberation
from deployments.strategies.merging import merge_streams
from deployments.strategies.options import StrategyOptions
from deployments.strategies.progress import Outcome, Progress
from deployments.strategies.proposals import Run

EventBatch = Sequence[tuple[int, Delta | Progress | Outcome]]  # index of the request, its event


def answers(
    service: Service,
    served: ServedEndpoint,
    requests: Sequence[Request],
    *,
    key: ApiKey = ANYBODY,
    priority: int = 0,
    arrived_s: float | None = None,
) -> AsyncGenerator[EventBatch, None]:
    """Deltas of all requests as they come, or progress and then an outcome of each. Leaving early cancels.

    Args:
        arrived_s: when the client's request came, by the monotonic clock; None: now.

    Raises:
        ConsortError: a request was refused, or failed; the others are cancelled.
    """
    if served.strategy is None:
        return service.run(requests, key=key, priority=priority, arrived_s=arrived_s)
    check = partial(service.check_wait, served, requests, key, priority)
    run: Run = partial(service.run, key=key, priority=priority, admitted=True)
    return _deliberated(service, served.config.models, served.strategy, requests, run, check)


async def _deliberated(
    service: Service,
    models: Sequence[str],
    strategy: StrategyOptions,
    requests: Sequence[Request],
    run: Run,
    check: Callable[[], None],
) -> AsyncGenerator[EventBatch, None]:
    check()
    deliberations = [Deliberation(one, models, strategy, run, service.ready_models) for one in requests]
    async with aclosing(merge_streams([one.events() for one in deliberations])) as events:
        async for index, event in events:
            yield [(index, event)]
