"""What a replica's process has: resources, environment variables, and how it imports and shares its interpreter."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deployments.configuration.model import ModelConfig
from engine.model.thread_environment import compute_environment

_SWITCH_INTERVAL_S = 0.0005  # an event loop and a model loop share the interpreter; the default is 5 ms


def actor_options(model: ModelConfig) -> dict[str, Any]:
    """Return Ray's options for a replica of a model."""
    return {
        "num_cpus": model.num_cpus,
        "num_gpus": model.num_gpus or 0,
        "resources": model.resources,
        "runtime_env": runtime_env(model.threads, gpus=bool(model.num_gpus)),
    }


def runtime_env(threads: int | None, *, gpus: bool = False) -> dict[str, Any]:
    """Return Ray's runtime environment for a process.

    threads: of the CPU; None leaves it to Ray.
    gpus: whether Ray assigns it GPUs. Otherwise they are hidden here: Ray does not, and `device: auto` would take one.
    """
    return {"env_vars": compute_environment(threads) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def share_interpreter() -> None:
    """Let threads take turns often enough for an event loop beside a model's loop."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in the block without garbage collections, which take a sixth of the time; modules are permanent."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
