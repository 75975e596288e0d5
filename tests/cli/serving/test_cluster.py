"""Messages about a failed start, and options of a local cluster. tests/server runs Ray itself."""

import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from cli.serving.cluster import (
    _all_resources,
    _check_deployments,
    _check_port,
    _in_a_line,
    _interrupt_at_signals,
    check_demand,
    failure,
)
from cli.serving.local_ray import fewer_processes
from decoding.errors import ConfigError, UnavailableError
from deployments.configuration.config import ServerConfig
from deployments.configuration.endpoint import EndpointConfig
from deployments.configuration.model import ModelConfig, ScalingConfig

TRACE = """The deployment failed to start 2 times in a row. Error:
ray::ServeReplica:consort:Target-target.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "replica.py", line 27, in load_runner
decoding.errors.ConfigError: models.target.path: can't load 'x': no such file

The above exception was the direct cause of the following exception:
RuntimeError: Traceback (most recent call last):
  File "app.py", line 61, in __init__
decoding.errors.ConfigError: models.target.path: can't load 'x': no such file
"""


def test_our_own_error_is_found_in_a_trace() -> None:
    assert failure(TRACE) == "models.target.path: can't load 'x': no such file"
    assert failure("Traceback\nSomeError: gone wrong\n") is None
    assert failure("") is None


def status(state: str, message: str, *, application: str = "DEPLOYING") -> Any:
    overview = SimpleNamespace(status=state, message=message)
    return SimpleNamespace(status=application, message="all is lost", deployments={"Target-target": overview})


def test_a_failed_start_is_one_line() -> None:
    _check_deployments(status("UPDATING", ""))
    with pytest.raises(ConfigError, match=r"^models\.target\.path: can't load 'x': no such file$"):
        _check_deployments(status("UPDATING", TRACE))
    with pytest.raises(ConfigError, match=r"^Target-target could not start: MemoryError: too big$"):
        _check_deployments(status("DEPLOY_FAILED", "Traceback\n...\nMemoryError: too big\n"))
    with pytest.raises(ConfigError, match="could not start: all is lost"):
        _check_deployments(status("UPDATING", "", application="DEPLOY_FAILED"))


def test_a_local_cluster_has_all_custom_resources() -> None:
    models = {
        "a": ModelConfig(path="x", replicas=2, resources={"target": 1, "fast": 0.5}),
        "b": ModelConfig(path="y", resources={"fast": 2}, scaling=ScalingConfig(min=0, max=3)),
    }
    config = ServerConfig(models=models, endpoints={"e": EndpointConfig(target="a", drafter="b")})
    assert _all_resources(config) == {"target": 2, "fast": 7}


def test_demands_beyond_the_machine_are_refused() -> None:
    models = {"a": ModelConfig(path="x", replicas=2, num_gpus=0.5, num_cpus=2)}
    config = ServerConfig(models=models, endpoints={"e": EndpointConfig(target="a")})
    check_demand(config, {"GPU": 1, "CPU": 4})
    with pytest.raises(ConfigError, match="num_gpus of all replicas is 1 together, but this machine has 0"):
        check_demand(config, {"CPU": 4})
    with pytest.raises(ConfigError, match="num_cpus of all replicas is 4 together, but this machine has 2"):
        check_demand(config, {"GPU": 1, "CPU": 2})


def test_parts_of_a_gpu_may_add_up_to_all_of_it() -> None:
    parts = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.3, "e": 0.1}
    assert sum(parts.values()) > 1
    models = {name: ModelConfig(path=name, num_gpus=part, num_cpus=0) for name, part in parts.items()}
    config = ServerConfig(models=models, endpoints={"e": EndpointConfig(target="a")})
    check_demand(config, {"GPU": 1})


def test_a_port_that_is_taken_is_refused_at_once() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"http\.port: can't listen on 127\.0\.0\.1:{port}"):
            _check_port("127.0.0.1", port, key="http.port")
    _check_port("127.0.0.1", port, key="http.port")
    with pytest.raises(ConfigError, match=r"http\.metrics_port: can't listen on nowhere\.invalid"):
        _check_port("nowhere.invalid", port, key="http.metrics_port")


def test_errors_of_other_libraries_are_a_line() -> None:
    with pytest.raises(UnavailableError, match=r"^no Ray: Timed out\. Busy\?$"), _in_a_line("no Ray"):
        raise TimeoutError("Timed out.\n\n  Busy?")
    with pytest.raises(UnavailableError, match=r"^no: RuntimeError$"), _in_a_line("no"):
        raise RuntimeError
    with pytest.raises(ConfigError, match=r"^ours$"), _in_a_line("no"):
        raise ConfigError("ours")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_end_a_server_that_a_script_starts_in_the_background(number: signal.Signals) -> None:
    """Shells let such jobs ignore SIGINT, and Python then leaves it so."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(number, signal.SIG_IGN)
        _interrupt_at_signals()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def test_ray_gets_its_processes_back_after_the_start() -> None:
    from ray._private.node import Node

    node: Any = SimpleNamespace()
    starts = {name: getattr(Node, name) for name in ("start_monitor", "start_log_monitor")}
    with fewer_processes(shows_logs=True):
        assert Node.start_monitor(node) is None
        assert Node.start_api_server(node, include_dashboard=False, raise_on_failure=False) is None
        assert Node.start_log_monitor is starts["start_log_monitor"]
    with fewer_processes(shows_logs=False):
        assert Node.start_log_monitor is not starts["start_log_monitor"]
    assert {name: getattr(Node, name) for name in starts} == starts
