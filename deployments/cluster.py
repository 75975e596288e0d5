"""Starts Ray and the Serve application, watches it come up, and takes it down again. Prints nothing."""

import logging
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from decoding.errors import ConfigError, UnavailableError
from deployments.config import ROOT, ServerConfig

if TYPE_CHECKING:
    from ray.serve.schema import DeploymentStatusOverview

State = Literal["waiting", "loading", "ready"]

_POLL_S = 0.2
_OUR_ERROR = re.compile(r"^(?:\w+\.)*(?:ConfigError|UnavailableError): (.*)$", re.MULTILINE)

LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ray listens on every interface, so a cluster of our own gets a token of its own. Left to itself, Ray would
    # write one to ~/.ray, which switches later `ray start` commands to tokens too.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a deployment is."""

    deployment: str
    state: State
    ready: int
    wanted: int


@contextmanager
def ray_cluster(config: ServerConfig, *, address: str | None, verbose: bool) -> Iterator[None]:
    """A Ray cluster to serve on: the one at `address`, or a local one that ends with the block.

    Raises:
        UnavailableError: there is no cluster at the address.
    """
    if not verbose:
        warnings.simplefilter("ignore")
    if address is None:
        for name, value in LOCAL_ENVIRONMENT.items():
            os.environ.setdefault(name, value or secrets.token_hex(32))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import ray  # after its environment is set

    level = logging.INFO if verbose else logging.ERROR
    try:
        if address is None:
            ray.init(
                address="local",
                _node_ip_address="127.0.0.1",
                include_dashboard=False,
                resources=_all_resources(config),
                log_to_driver=verbose,
                logging_level=level,
            )
        else:
            runtime_env = {"working_dir": str(ROOT)}
            ray.init(address=address, runtime_env=runtime_env, log_to_driver=verbose, logging_level=level)
    except ConnectionError as error:
        raise UnavailableError(f"no Ray cluster answers at {address}: {error}") from error
    logging.getLogger("ray.serve").setLevel(level)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def application(config: ServerConfig, watch: Callable[[list[Progress]], None]) -> Iterator[None]:
    """The application, up and ready; it ends with the block. `watch` is told again and again how far it is.

    Raises:
        ConsortError: a deployment could not start, or the port is taken.
    """
    from ray import serve

    from deployments.app import APP_NAME, build_application

    serve.start(proxy_location="HeadOnly", http_options={"host": config.http.host, "port": config.http.port})
    try:
        target = serve.RunTarget(target=build_application(config), name=APP_NAME, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait_until_ready(watch)
        yield
    finally:
        serve.delete(APP_NAME, _blocking=False)


def _wait_until_ready(watch: Callable[[list[Progress]], None]) -> None:
    from ray import serve

    from deployments.app import APP_NAME

    while True:
        status = serve.status().applications[APP_NAME]
        progress = [_progress(name, overview) for name, overview in status.deployments.items()]
        watch(progress)
        for name, overview in status.deployments.items():
            reason = failure(overview.message)
            if reason is not None or overview.status == "DEPLOY_FAILED":
                raise ConfigError(f"{name} could not start: {reason or overview.message}")
        if status.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def _progress(name: str, overview: "DeploymentStatusOverview") -> Progress:
    replicas = {str(state): count for state, count in overview.replica_states.items()}
    state: State = "waiting"
    if overview.status == "HEALTHY":
        state = "ready"
    elif replicas.get("STARTING"):
        state = "loading"
    return Progress(name, state, replicas.get("RUNNING", 0), sum(replicas.values()))


def failure(message: str) -> str | None:
    """Our own error's text in the traceback that Serve reports for a replica which could not start, if there is one."""
    found = _OUR_ERROR.findall(message)
    return found[-1].strip() if found else None


def _all_resources(config: ServerConfig) -> dict[str, float]:
    """What all replicas ask for together, so that a configuration for a cluster also runs on one machine."""
    total: dict[str, float] = {}
    for model in config.models.values():
        for name, amount in model.resources.items():
            total[name] = total.get(name, 0) + amount * model.replicas
    return total
