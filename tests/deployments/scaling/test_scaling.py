"""Scaling as it is configured, asked for over HTTP and put to Serve; a cluster that does it is in tests/server."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from fastapi.testclient import TestClient
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from decoding.errors import ConfigError, UnavailableError
from deployments.apis.errors import install_error_handlers
from deployments.app import BuildArgs, build, build_application
from deployments.configuration.api_keys import KeyRing, key_of
from deployments.configuration.config import parse_config
from deployments.configuration.model import ScalingConfig
from deployments.configuration.paths import ROOT
from deployments.http.admin_routes import add_scaling_route
from deployments.http.middleware import Gate
from deployments.scaling import controller
from deployments.scaling.controller import set_replicas, with_fixed_count

MODELS = {
    "large": {"path": "org/large", "scaling": {"max": 4}},
    "small": {"path": "org/small", "replicas": 2, "scaling": {"min": 0, "max": 3, "down_delay_s": 60}},
}
CONFIG = {"models": MODELS, "endpoints": {"both": {"target": "large", "drafter": "small"}}}


def test_models_that_scale_are_serves_to_scale() -> None:
    ingress: Any = build(
        BuildArgs(config=CONFIG, require_api_key=False)
    )._bound_deployment  # Serve keeps the application's parts private
    handles = ingress.init_args[1]
    large, small = (handles[name]._bound_deployment._deployment_config.autoscaling_config for name in MODELS)
    assert (large.min_replicas, large.initial_replicas, large.max_replicas) == (1, 1, 4)
    assert (small.min_replicas, small.initial_replicas, small.max_replicas) == (0, 2, 3)
    assert small.downscale_delay_s == 60
    assert small.policy.policy_kwargs["targets"] == ["Target-large"]


def test_targets_of_drafters_that_scale_tell_their_load() -> None:
    models = MODELS | {"large": {"path": "org/large", "replicas": 2}}
    ingress: Any = build(BuildArgs(config=CONFIG | {"models": models}, require_api_key=False))._bound_deployment
    large = ingress.init_args[1]["large"]._bound_deployment._deployment_config.autoscaling_config
    assert (large.min_replicas, large.initial_replicas, large.max_replicas) == (2, 2, 2)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"min": 3, "max": 2}, r"models\.small\.scaling\.min: .*at most max"),
        ({"max": 2, "look_back_s": 20}, r"models\.small\.scaling\.look_back_s: is gone: .* 20 s"),
        ({"min": 1}, r"max"),
    ],
)
def test_bounds_that_cannot_work(scaling: dict[str, float], message: str) -> None:
    models = MODELS | {"small": {"path": "org/small", "scaling": scaling}}
    with pytest.raises(ConfigError, match=message):
        parse_config(CONFIG | {"models": models}, folder=Path.cwd())


def test_the_aims_reach_the_policy_in_its_units() -> None:
    models = MODELS | {"large": {"path": "org/large", "scaling": {"max": 4, "ttft_ms": 500, "tokens_per_s": 20}}}
    ingress: Any = build(BuildArgs(config=CONFIG | {"models": models}, require_api_key=False))._bound_deployment
    rules = ingress.init_args[1]["large"]._bound_deployment._deployment_config.autoscaling_config.policy.policy_kwargs
    assert (rules["ttft_s"], rules["tokens_per_s"]) == (0.5, 20)


SCALING = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_a_target_may_scale_to_zero_where_a_policy_wakes_it() -> None:
    models = MODELS | {"large": {"path": "org/large", "scaling": {"min": 0, "max": 2}}}
    config = parse_config(CONFIG | {"models": models}, folder=Path.cwd())
    scaled: Any = build_application(config, autoscale=True)._bound_deployment
    fixed: Any = build_application(config)._bound_deployment
    assert (scaled.init_args[2], fixed.init_args[2]) == ({"large"}, set())


def test_the_documented_file_is_one_that_ray_takes() -> None:
    (block,) = [block for block in SCALING.split("```yaml\n") if block.startswith("applications:")]
    (application,) = yaml.safe_load(block.split("```")[0])["applications"]
    assert ServeApplicationSchema.model_validate(application).external_scaler_enabled
    fixed = {"name": "Target-large", "num_replicas": 2, "autoscaling_config": None}
    ServeApplicationSchema.model_validate(application | {"deployments": [fixed]})
    scaled = {"name": "Target-large", "autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}
    with pytest.raises(ValueError, match="external_scaler_enabled"):
        ServeApplicationSchema.model_validate(application | {"deployments": [scaled]})


def test_scaling_by_hand_restarts_nothing() -> None:
    """Serve restarts everything when the version of the code changes, into which it counts policies and arguments."""
    application = ServeApplicationSchema.model_validate(
        {
            "name": "consort",
            "import_path": "deployments.app:build",
            "args": {"config": CONFIG},
            "autoscaling_policy": {"policy_function": "deployments.scaling.policy:scale"},
            "external_scaler_enabled": True,
            "deployments": [{"name": "Target-large", "ray_actor_options": {"num_cpus": 1}}],
        }
    )
    changed = with_fixed_count(with_fixed_count(application, "Target-large", 3), "Drafter-small", 0)
    assert get_app_code_version(changed) == get_app_code_version(application)
    large, small = changed.deployments
    assert (large.num_replicas, large.autoscaling_config) == (3, None)
    assert large.ray_actor_options == application.deployments[0].ray_actor_options
    assert (small.name, small.num_replicas) == ("Drafter-small", 1)
    assert "num_replicas" not in application.deployments[0].model_fields_set


def routes(asked: list[tuple[str, int]], keys: KeyRing) -> TestClient:
    """A server that has nothing but the route, and notes what it is asked."""

    async def set_replicas(model: str, count: int) -> None:
        asked.append((model, count))

    api = FastAPI()
    api.add_middleware(Gate, keys=keys, max_body_bytes=1000)
    install_error_handlers(api)
    add_scaling_route(api, {"large": "target", "small": "drafter"}, set_replicas)
    return TestClient(api)


def test_the_route() -> None:
    asked: list[tuple[str, int]] = []
    client = routes(asked, KeyRing(()))
    reply = client.post("/scale", json={"model": "small", "replicas": 0})
    assert (reply.status_code, reply.json()) == (200, {"model": "small", "replicas": 0})
    assert asked == [("small", 0)]
    for body, field in (
        ({"model": "smal", "replicas": 1}, "model"),
        ({"model": "large", "replicas": 0}, "replicas"),
        ({"model": "large", "replicas": -1}, "replicas"),
        ({"model": "large", "replicas": 1, "replica": 1}, "replica"),
    ):
        reply = client.post("/scale", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
    assert len(asked) == 1


def test_only_an_admin_scales() -> None:
    given = {"website": {"key": "visitor"}, "operator": {"key": "boss", "admin": True}}
    http = parse_config(CONFIG | {"http": {"api_keys": given}}, folder=Path.cwd()).http
    http.add_key("command-line", key_of("owner", field="--api-key", admin=True))
    asked: list[tuple[str, int]] = []
    client = routes(asked, http.key_ring())
    body = {"model": "small", "replicas": 2}
    for sent in (body, {}):
        refused = client.post("/scale", json=sent, headers={"Authorization": "Bearer visitor"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert "http.api_keys.website.admin: true" in refused.json()["error"]["message"]
    assert client.post("/scale", json=body).status_code == 401
    for secret in ("boss", "owner"):
        assert client.post("/scale", json=body, headers={"Authorization": f"Bearer {secret}"}).status_code == 200
    assert asked == [("small", 2)] * 2


def test_every_key_is_documented() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for name, field in ScalingConfig.model_fields.items():
        default = "required" if field.is_required() else f"`{'null' if field.default is None else field.default}`"
        assert f"| `{name}` | {default} | {field.description} |" in page


def test_a_controller_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while Ray's head is dead: Ray keeps the call for the controller's next life."""
    silent = SimpleNamespace(get_app_configs=SimpleNamespace(remote=asyncio.Event().wait))
    monkeypatch.setattr("ray.serve.context._get_global_client", lambda: SimpleNamespace(_controller=silent))
    monkeypatch.setattr(controller, "_ANSWER_TIMEOUT_S", 0.01)
    with pytest.raises(UnavailableError, match="has not answered"):
        asyncio.run(set_replicas("consort", "Target-large", 2))
