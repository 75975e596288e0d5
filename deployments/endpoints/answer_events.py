"""Events of an endpoint's answers: deltas of its models, or a choice among whole answers. Knows no HTTP."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from actors.coordinator.request import Delta, Request
from deployments.configuration.api_keys import ANYBODY, ApiKey
from deployments.endpoints.endpoint import ServedEndpoint
from deployments.endpoints.service import Service
from deployments.strategies.deliberation import Deliberation, Outcome, Progress
from deployments.strategies.members import Run, merge_streams
from deployments.strategies.options import StrategyOptions

EventBatch = Sequence[tuple[int, Delta | Progress | Outcome]]  # index of the request, its event


def answer_events(
    service: Service,
    served: ServedEndpoint,
    requests: Sequence[Request],
    *,
    key: ApiKey = ANYBODY,
    priority: int = 0,
    arrived_s: float | None = None,
    streamed: bool = False,
) -> AsyncGenerator[EventBatch, None]:
    """Yield deltas of all requests as they arrive, or progress and then an outcome for each.

    Closing the generator cancels the requests.

    Args:
        arrived_s: arrival of the client's request, by the monotonic clock; None: now.
        streamed: whether each batch is sent to the client, so that under load fewer batches are better.

    Raises:
        ConsortError: a request was refused, or failed; the others are cancelled.
    """
    if served.strategy is None:
        return service.run(requests, key=key, priority=priority, arrived_s=arrived_s, paced=streamed)
    check = partial(service.check_wait, served, requests, key, priority)
    run: Run = partial(service.run, key=key, priority=priority, admitted=True)
    return _deliberate(service, served.config.models, served.strategy, requests, run, check)


async def _deliberate(
    service: Service,
    models: Sequence[str],
    strategy: StrategyOptions,
    requests: Sequence[Request],
    run: Run,
    check: Callable[[], None],
) -> AsyncGenerator[EventBatch, None]:
    check()
    deliberations = [Deliberation(request, models, strategy, run, service.servable_models) for request in requests]
    async with aclosing(merge_streams([deliberation.events() for deliberation in deliberations])) as events:
        async for index, event in events:
            yield [(index, event)]
