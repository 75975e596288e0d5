"""A request from its admission to its end. Knows no queue."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actors.coordinator.request import Delta, Request
from deployments.configuration.api_keys import ApiKey

Sink = Callable[[Delta], None]


@dataclass(slots=True, eq=False)
class Ticket:
    """A waiting or running request."""

    request: Request
    sink: Sink
    key: ApiKey
    arrived_s: float
    priority: int = 0  # among the requests of its key, lower ones begin first
    deadline: asyncio.TimerHandle | None = None
    state: Literal["waiting", "running", "ended"] = "waiting"
    committed: int = 0  # tokens of its answer so far
    charged: bool = True  # whether it counts in its key's minute

    @property
    def tokens(self) -> int:
        """Most tokens that its slot will hold."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def target(self) -> str:
        return self.request.endpoint.target
