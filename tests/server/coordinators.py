"""A server with several coordinators, two targets and keys with limits, for the tests beside it. Argument: the port.

Prints a line once it serves, and once it has as many coordinators as a line of its standard input says. Ends with it.
"""

import sys
from functools import partial
from typing import Any

from cli.serving.cluster import serving
from deployments.configuration.config import TINY_CONFIG, load_config, parse_config
from deployments.configuration.paths import ROOT
from deployments.replicas.environment import APP_NAME, COORDINATOR
from tests.support.waiting import wait_until

API_KEYS = {
    "free": {"key": "key-free"},
    "few": {"key": "key-few", "max_requests": 3},
    "slow": {"key": "key-slow", "requests_per_minute": 10},
}


def main(port: int) -> None:
    """Start one coordinator, then deploy as many as are asked for, as a Serve file does."""
    content = load_config(TINY_CONFIG).model_dump(mode="json", exclude_unset=True)
    content["http"] = {"port": port, "api_keys": API_KEYS}
    content["models"]["target"]["replicas"] = 2
    for model in content["models"].values():
        model["threads"] = 1
    with serving(parse_config(content, folder=ROOT), address=None, watch=lambda progress: None):
        for line in sys.stdin:
            count = int(line)
            _deploy(content, count)
            wait_until(partial(_has, count), f"{count} coordinators", timeout_s=240)
            print("ready", flush=True)


def _deploy(content: dict[str, Any], coordinators: int) -> None:
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    client = _get_global_client()
    assert client is not None
    application = {
        "name": APP_NAME,
        "import_path": "deployments.app:build",
        "args": {"config": content},
        "external_scaler_enabled": True,
        "deployments": [{"name": COORDINATOR, "num_replicas": coordinators}],
    }
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


def _has(coordinators: int) -> bool:
    from ray import serve

    status = serve.status().applications[APP_NAME]
    states = [dict(deployment.replica_states) for deployment in status.deployments.values()]
    counts = {name: sum(deployment.replica_states.values()) for name, deployment in status.deployments.items()}
    running = all({str(state) for state in by_state} == {"RUNNING"} for by_state in states)
    return status.status == "RUNNING" and running and counts.get(COORDINATOR) == coordinators


if __name__ == "__main__":
    main(int(sys.argv[1]))
