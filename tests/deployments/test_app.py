"""The built Serve application, without starting it."""

from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from decoding.errors import ConfigError
from deployments.app import BuildArgs, build
from deployments.configuration.config import load_config

CONFIG = {
    "models": {
        "large": {"path": "org/large", "replicas": 3, "num_gpus": 0.5, "resources": {"target": 1}, "threads": 2},
        "small": {"path": "org/small"},
    },
    "endpoints": {"both": {"target": "large", "drafter": "small"}},
}


def deployments_of(args: BuildArgs) -> dict[str, Any]:
    """Deployments of the built application by name. Serve keeps them private."""
    ingress: Any = build(args)._bound_deployment
    handles = ingress.init_args[1]
    return {
        deployment.name: deployment for deployment in (ingress, *(app._bound_deployment for app in handles.values()))
    }


@pytest.fixture
def deployments() -> dict[str, Any]:
    return deployments_of(BuildArgs(config=CONFIG, require_api_key=False))


def test_one_deployment_per_model_and_the_coordinator(deployments: dict[str, Any]) -> None:
    assert set(deployments) == {"Coordinator", "Target-large", "Drafter-small"}
    assert set(deployments_of(BuildArgs(require_api_key=False))) == {"Coordinator", "Target-smollm2"}


def test_replicas_get_what_is_configured(deployments: dict[str, Any]) -> None:
    large = deployments["Target-large"]
    assert large.num_replicas == 3
    assert large.ray_actor_options["num_gpus"] == 0.5
    assert large.ray_actor_options["resources"] == {"target": 1}
    environment = large.ray_actor_options["runtime_env"]["env_vars"]
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert large.init_args == (
        "large",
        "target",
        BuildArgs(config=CONFIG).load().models["large"],
        {},
        {},
        {},
        None,
        None,
    )


def test_only_replicas_that_ask_for_gpus_see_any(deployments: dict[str, Any]) -> None:
    visible = {
        name: deployment.ray_actor_options["runtime_env"]["env_vars"].get("CUDA_VISIBLE_DEVICES")
        for name, deployment in deployments.items()
    }
    assert visible == {"Coordinator": "", "Target-large": None, "Drafter-small": ""}


def test_everything_fits_on_the_smallest_machine() -> None:
    options = [deployment.ray_actor_options for deployment in deployments_of(BuildArgs(require_api_key=False)).values()]
    assert sum(option["num_cpus"] for option in options) == 0


def test_serves_own_limits_never_come_first(deployments: dict[str, Any]) -> None:
    assert all(deployment.max_ongoing_requests >= 10_000 for deployment in deployments.values())


def test_a_withdrawn_coordinator_has_time_for_its_requests() -> None:
    args = BuildArgs(config=CONFIG | {"http": {"drain_s": 77}}, require_api_key=False)
    assert deployments_of(args)["Coordinator"]._deployment_config.graceful_shutdown_timeout_s > 77


def test_a_path_is_read_and_content_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("models: {m: {path: org/m}}\nendpoints: {e: {target: m}}\n", encoding="utf-8")
    assert BuildArgs(config=str(file)).load().roles() == {"m": "target"}
    assert BuildArgs().load() == load_config()


def test_a_model_over_several_devices_gets_room_for_each() -> None:
    model = {"path": "org/large", "tensor_parallel": 2, "num_gpus": 1, "num_cpus": 2, "resources": {"target": 1}}
    config = {"models": {"large": model}, "endpoints": {"e": {"target": "large"}}}
    large = deployments_of(BuildArgs(config=config, require_api_key=False))["Target-large"]
    assert large._replica_config.placement_group_bundles == [{"CPU": 2, "GPU": 1, "target": 1}] * 2


def test_devices_that_are_not_said_can_be_shared_by_nobody() -> None:
    model = {"path": "org/large", "tensor_parallel": 2, "num_gpus": 0}
    with pytest.raises(ConfigError, match=r"models\.large\.tensor_parallel: set num_cpus, which"):
        BuildArgs(config={"models": {"large": model}, "endpoints": {"e": {"target": "large"}}}).load()


KEYS = {"inline": {"key": "TOPSECRET1"}, "env": {"env": "MY_KEY"}, "file": {"file": "key"}}


def test_no_secret_is_in_what_actors_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "TOPSECRET2")
    monkeypatch.setenv("CONSORT_API_KEY", "TOPSECRET3")
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("TOPSECRET4", encoding="utf-8")
    built = deployments_of(BuildArgs(config=CONFIG | {"http": {"api_keys": KEYS}}))
    for deployment in built.values():
        handles = [argument for argument in deployment.init_args if argument is not built["Coordinator"].init_args[1]]
        assert b"TOPSECRET" not in cloudpickle.dumps((handles, deployment.init_kwargs, deployment.ray_actor_options))
    http = built["Coordinator"].init_args[0].http
    ring = cloudpickle.loads(cloudpickle.dumps(http)).key_ring()
    assert all(ring.find(f"Bearer TOPSECRET{number}") for number in range(1, 5))


def test_a_serve_file_says_who_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no API key.*CONSORT_API_KEY.*require_api_key: false"):
        build(BuildArgs(config=CONFIG))
    build(BuildArgs(config=CONFIG, require_api_key=False))
    monkeypatch.setenv("CONSORT_API_KEY", "secret")
    build(BuildArgs(config=CONFIG))
