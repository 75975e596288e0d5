"""Start Ray and the application, report the progress, and stop both.

Ray is imported in functions: its environment must be set first, and commands without it start faster.
"""

import asyncio
import faulthandler
import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cli.serving.local_ray import fewer_processes, local_environment
from cli.serving.progress import StartProgress, Watch
from decoding.errors import ConfigError, ConsortError, UnavailableError
from deployments.client import Client
from deployments.configuration.config import ServerConfig
from deployments.configuration.document import Mistakes
from deployments.configuration.http import HttpConfig
from deployments.configuration.paths import IS_CHECKOUT, ROOT

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

_POLL_S = 0.2
_MARGIN_S = 5.0  # for coordinators to answer after a drain
_PROXY_S = 120.0  # until the proxy listens; as `RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S`
_SHUTDOWN_S = 60.0  # for Ray's processes to end
_FLUSH_S = 0.3  # for the proxy to pass on the last bytes
_SHOWN_CHARACTERS = 400  # of another library's error
_OUR_ERROR = re.compile(r"^(?:\w+\.)*(?:ConfigError|UnavailableError): (.*)$", re.MULTILINE)


@contextmanager
def serving(config: ServerConfig, *, address: str | None, watch: Watch, log_level: str | None = None) -> Iterator[None]:
    """Run the application, on the Ray cluster at `address` or on a local one, until the block ends.

    log_level: from which level on to show what Ray and the replicas log; None shows nothing.
    watch: called repeatedly with the progress of all deployments until they are ready.

    Raises ConfigError if a model could not be loaded, or the port is taken. Once Ray runs, a note names its logs.
    Raises UnavailableError if no cluster answers at the address, or Ray or Serve did not start in time.
    """
    if log_level is None:
        warnings.simplefilter("ignore")
    _interrupt_at_signals()
    watch([StartProgress("Ray", "loading")])
    with _ray_exit_as_interrupt():
        if address is None:
            _check_port(config.http.host, config.http.port, key="http.port")
            if config.http.metrics_port is not None:
                _check_port("127.0.0.1", config.http.metrics_port, key="http.metrics_port")
            _start_ray(config, log_level)
        else:
            _join_ray(address, log_level)
    _interrupt_at_signals()  # Ray has set a handler that prints a stack trace
    import ray

    try:
        with _in_a_line("the server could not start"):
            if address is None:
                check_demand(config, ray.cluster_resources())
            _deploy(config)
            _wait_until_ready(watch)
            if address is None:
                _wait_for_discovery(local_client(config.http))
        yield
    except ConsortError as error:
        session = ray.get_runtime_context().get_session_name()
        folder = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/{session}/logs"
        error.add_note(f"Logs: {folder}, those of the replicas in serve/")
        raise
    finally:
        with _uninterrupted():
            if address is not None:
                from ray import serve

                from deployments.replicas.environment import APP_NAME

                serve.delete(APP_NAME)
            with _limited(_SHUTDOWN_S):
                ray.shutdown()


def local_client(http: HttpConfig, api_key: str | None = None) -> Client:
    """Return a client of a server on this machine, whatever its certificate says."""
    return Client(http.url, api_key, tls=None if http.tls is None else http.tls.client_context(), local=True)


def start_standby() -> None:
    """Start a second coordinator, which serves once the first has died. Returns before it is up."""
    from deployments.replicas.environment import APP_NAME, LOCAL_COORDINATOR
    from deployments.scaling.controller import set_replicas

    asyncio.run(set_replicas(APP_NAME, LOCAL_COORDINATOR, 2))


def drain(config: ServerConfig) -> int:
    """Let all coordinators stop taking requests, and wait up to `http.drain_s` for those in progress.

    Returns:
        How many requests have not ended.
    """
    from ray import serve

    from deployments.replicas.environment import APP_NAME, LOCAL_COORDINATOR

    # The check has no time limit.
    handle = serve.get_deployment_handle(LOCAL_COORDINATOR, APP_NAME, _check_exists=False)
    answers = handle.broadcast("drain").results(timeout_s=config.http.drain_s + _MARGIN_S, return_exceptions=True)
    time.sleep(_FLUSH_S)
    return sum(answer for answer in answers if isinstance(answer, int))


def failure(message: str) -> str | None:
    """Return the text of our own error in the traceback of a replica that could not start; None if there is none."""
    errors = _OUR_ERROR.findall(message)
    return errors[-1].strip() if errors else None


@contextmanager
def _in_a_line(what: str) -> Iterator[None]:
    """Turn errors of other libraries in the block into UnavailableError. what: went wrong."""
    try:
        yield
    except ConsortError:
        raise
    except Exception as error:  # what Ray raises is not documented
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnavailableError(f"{what}: {reason[:_SHOWN_CHARACTERS]}") from error


def _interrupt_at_signals() -> None:
    """Let SIGTERM and SIGINT raise KeyboardInterrupt. Shells let a script's background jobs ignore SIGINT."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM in the block, which ends by itself; interrupted, it would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End the process if the block takes longer, and say where its threads were. Some of Ray's waits have no limit."""

    def give_up() -> None:
        try:
            faulthandler.dump_traceback(all_threads=True)
        finally:
            os._exit(1)  # a local Ray's processes end with this one

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _start_ray(config: ServerConfig, log_level: str | None) -> None:
    from deployments.http.proxy import CALLBACK

    environment = local_environment(has_metrics=config.http.metrics_port is not None)
    environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = CALLBACK
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if IS_CHECKOUT:  # an installed package is found as every other is
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    import ray

    with suppress(ImportError):  # `ray.init` imports it too, beside the thread below: not the same module at once
        from ray.dashboard import optional_deps  # noqa: F401
    logs = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "session_latest" / "logs"
    threading.Thread(target=_import_application, daemon=True).start()
    with _in_a_line(f"Ray could not start (logs: {logs})"), fewer_processes(shows_logs=log_level is not None):
        ray.init(
            address="local",
            include_dashboard=False,
            resources=_all_resources(config),
            log_to_driver=log_level is not None,
            logging_level=_logging_level(log_level),
            logging_config=None if log_level is None else ray.LoggingConfig(log_level=log_level.upper()),
            _metrics_export_port=config.http.metrics_port,
        )


def _import_application() -> None:
    """Import what takes as long as Ray's processes take to start. `_deploy` says what goes wrong with it."""
    with suppress(Exception):
        from deployments import app  # noqa: F401


@contextmanager
def _ray_exit_as_interrupt() -> Iterator[None]:
    """Turn the exit by which Ray, while it starts, reacts to SIGTERM into what Ctrl-C raises."""
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error


def _join_ray(address: str, log_level: str | None) -> None:
    import ray

    try:
        ray.init(
            address=address,
            runtime_env={"working_dir": str(ROOT)} if IS_CHECKOUT else {"py_modules": [str(ROOT)]},
            log_to_driver=log_level is not None,
            logging_level=_logging_level(log_level),
        )
    except ConnectionError as error:
        raise UnavailableError(f"no Ray cluster answers at {address!r}: {error}") from error


def _deploy(config: ServerConfig) -> None:
    import ray
    from ray import serve
    from ray.serve._private.api import _create_controller_and_proxy_refs
    from ray.serve.config import ControllerOptions
    from ray.serve.context import _get_global_client

    from deployments.app import build_application
    from deployments.replicas.environment import APP_NAME

    logging.getLogger("ray.serve").setLevel(logging.getLogger("ray").level)
    http_options = {"host": config.http.host, "port": config.http.port}
    if (tls := config.http.tls) is not None:
        http_options |= {"ssl_keyfile": tls.key, "ssl_certfile": tls.certificate}  # in the order that Serve checks
    application = build_application(config)
    target = serve.RunTarget(target=application, name=APP_NAME, route_prefix="/", external_scaler_enabled=True)
    proxies: list[ray.ObjectRef[None]] = []
    if _get_global_client(raise_if_no_controller_running=False) is not None:
        serve.start(http_options=http_options)  # says which options the running Serve does not take
    else:
        # `serve.start` would wait for the proxy, which starts while the replicas do. Not in a thread: that could be
        # neither interrupted nor left behind.
        _, proxies = _create_controller_and_proxy_refs(
            http_options, None, None, None, ControllerOptions(), proxy_location="HeadOnly"
        )
    serve.run_many([target], wait_for_applications_running=False)
    ray.get(proxies, timeout=_PROXY_S)


def _wait_until_ready(watch: Watch) -> None:
    from ray import serve

    from deployments.replicas.environment import APP_NAME

    while True:
        status = serve.status().applications[APP_NAME]
        watch([_progress(name, overview) for name, overview in status.deployments.items()])
        _check_deployments(status)
        if status.status == "RUNNING":
            return
        time.sleep(_POLL_S)


def _wait_for_discovery(client: Client) -> None:
    """Wait until the coordinator knows a replica of every model, moments after the deployments are up."""
    while not all(client.get("/health").document["models"].values()):
        time.sleep(_POLL_S)


def _progress(name: str, overview: "DeploymentStatusOverview") -> StartProgress:
    from deployments.replicas.stages import stage_of

    if overview.status == "HEALTHY":
        return StartProgress(name, "ready")
    if "STARTING" not in map(str, overview.replica_states):
        return StartProgress(name, "waiting")
    return StartProgress(name, stage_of(name))


def _check_deployments(status: "ApplicationStatusOverview") -> None:
    """Raise ConfigError as soon as a replica has failed for a permanent reason."""
    for name, overview in status.deployments.items():
        reason = failure(overview.message)
        if reason is not None or overview.status == "DEPLOY_FAILED":
            raise ConfigError(reason or f"{name} could not start: {overview.message.strip().splitlines()[-1]}")
    if status.status == "DEPLOY_FAILED":
        raise ConfigError(f"the application could not start: {status.message}")


def _check_port(host: str, port: int, *, key: str) -> None:
    """Raise ConfigError if the port is taken. key: the port's."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key}: can't listen on {host}:{port}: {error.strerror}") from error


def check_demand(config: ServerConfig, available: Mapping[str, float], unusable_gpus: str | None = None) -> None:
    """Raise ConfigError if the replicas need more than the machine has: they would wait for ever.

    unusable_gpus: why GPUs that are there don't count.
    """
    models = config.models.values()
    demands = {
        "GPU": ("num_gpus", sum((model.num_gpus or 0) * model.processes for model in models)),
        "CPU": ("num_cpus", sum(model.num_cpus * model.processes for model in models)),
    }
    mistakes = Mistakes()
    for resource, (key, wanted) in demands.items():
        amount = available.get(resource, 0)
        if round(wanted, 4) > amount:  # Ray counts ten-thousandths
            reason = f": {unusable_gpus}" if resource == "GPU" and unusable_gpus else ""
            mistakes.note(
                f"models: {key} of all replicas is {wanted:g} together, but this machine has {amount:g}{reason}"
            )
    mistakes.check()


def _all_resources(config: ServerConfig) -> dict[str, float]:
    """Return the custom resources of all replicas, at their largest number.

    A local cluster offers them, so that a configuration for several nodes also runs on one.
    """
    total: dict[str, float] = {}
    for model in config.models.values():
        most = max(model.replicas, model.scaling.max if model.scaling else 0)
        for name, amount in model.resources.items():
            total[name] = total.get(name, 0) + amount * most * model.tensor_parallel
    return total


def _logging_level(name: str | None) -> int:
    return logging.ERROR if name is None else logging.getLevelNamesMapping()[name.upper()]
