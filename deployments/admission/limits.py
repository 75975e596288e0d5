"""How many requests and tokens a server accepts. Knows no requests."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.configuration.config import ServerConfig
from deployments.configuration.model import ModelConfig
from engine.loading.memory_rules import free_host_bytes

READY = 2  # requests beyond the slots, so that no slot stays empty between two requests
_MOST_SLOTS = 64  # of a replica whose slots are `auto`
_LEAST_BOUND = 256  # least default of max_requests …
_MOST_BOUND = 8192  # … and the most that memory gives; Serve passes 10,000 on to a coordinator
_BYTES_PER_REQUEST = 2**23  # of free memory, so that waiting requests take a few percent of it


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of accepted requests; more are refused."""

    max_requests: int = 256  # in progress or waiting
    max_tokens: int | None = None  # prompts and answers together
    # By target: requests that may run, more if its replicas have more slots. Targets not listed: any number.
    running: Mapping[str, int] = field(default_factory=dict)
    max_queue_wait_s: float | None = math.inf  # predicted; 0 or None: half the time of an answer


def limits_of(config: ServerConfig) -> Limits:
    """Limits of a configuration. By default as many requests run as the targets have slots, and a few more.

    How many may wait follows from this machine's free memory.
    """
    targets = {name: config.models[name] for endpoint in config.endpoints.values() for name in endpoint.models}
    running = {name: _slots(model) * model.replicas + READY for name, model in targets.items()}
    most = sum(_slots(model) * _most_replicas(model) for model in targets.values())
    fitting = min(free_host_bytes() // _BYTES_PER_REQUEST, _MOST_BOUND)
    max_requests = config.http.max_requests or max(_LEAST_BOUND, 2 * most, fitting)
    return Limits(max_requests, config.http.max_tokens, running, config.http.max_queue_wait_s)


def _slots(model: ModelConfig) -> int:
    return _MOST_SLOTS if model.slots == "auto" else model.slots


def _most_replicas(model: ModelConfig) -> int:
    return max(model.replicas, 0 if model.scaling is None else model.scaling.max)
