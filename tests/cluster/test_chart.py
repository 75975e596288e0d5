"""The Helm chart: it makes what the kustomization does, and with values what Ray, KubeRay and Consort take.

What Helm must render is skipped where there is neither `helm` nor the package helm-python-sdk (`make test-chart`).
"""

import copy
import importlib
import importlib.util
import json
import shutil
import subprocess
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from deployments.app import BuildArgs
from deployments.configuration.config import ServerConfig
from deployments.configuration.paths import ROOT
from tests.cluster.test_files import SCHEMA as RAYSERVICE

CHART, VALUES = ROOT / "kubernetes" / "chart", ROOT / "kubernetes" / "values"
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
EXAMPLES = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(VALUES.glob("*.yaml"))}
Documents = dict[tuple[str, str], dict[str, Any]]  # by kind and name

needs_helm = pytest.mark.skipif(
    shutil.which("helm") is None and importlib.util.find_spec("helm_python") is None, reason="there is no Helm"
)


def render(values: dict[str, Any]) -> Documents:
    """Return what `helm template consort kubernetes/chart` makes; raises ValueError with Helm's words."""
    if shutil.which("helm") is not None:
        command = ["helm", "template", "consort", str(CHART), "--values", "-"]
        done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return by_name([done.stdout])
    helm: Any = importlib.import_module("helm_python")
    try:
        with helm.Chart.load(str(CHART)) as chart:
            chart.validate_schema(values)
            return by_name(list(chart.render(values, name="consort", namespace="default").values()))
    except helm.HelmError as error:
        raise ValueError(str(error)) from error


def by_name(files: list[str]) -> Documents:
    documents = [document for file in files for document in yaml.safe_load_all(file) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def pods(service: dict[str, Any]) -> dict[str, dict[str, Any]]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in {"head": cluster["headGroupSpec"], **groups}.items()}


def served(service: dict[str, Any]) -> tuple[dict[str, Any], ServerConfig]:
    """The Serve application, and the configuration that it loads."""
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    ServeDeploySchema.model_validate(serve)
    (application,) = serve["applications"]
    return application, BuildArgs.model_validate(application["args"]).load()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_values_that_the_chart_takes(name: str) -> None:
    jsonschema.validate(EXAMPLES[name], SCHEMA)
    jsonschema.validate(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")), SCHEMA)
    misspelt = {"coordinator": EXAMPLES[name].get("coordinators", {})}
    with pytest.raises(jsonschema.ValidationError, match="coordinator"):
        jsonschema.validate(misspelt, SCHEMA)


def test_the_charts_own_files_are_values_too() -> None:
    files = {"configuration": "models.yaml", "pools": "pools.yaml"}
    about, values = (yaml.safe_load((CHART / f"{name}.yaml").read_text("utf-8")) for name in ("Chart", "values"))
    assert about["appVersion"] == values["image"]["tag"]
    jsonschema.validate({key: yaml.safe_load((CHART / file).read_text("utf-8")) for key, file in files.items()}, SCHEMA)
    assert (CHART / "models.yaml").resolve() == ROOT / "kubernetes" / "models.yaml"


@needs_helm
def test_without_values_it_makes_what_the_kustomization_makes() -> None:
    resources = yaml.safe_load((ROOT / "kubernetes" / "kustomization.yaml").read_text("utf-8"))["resources"]
    expected = by_name([(ROOT / "kubernetes" / name).read_text(encoding="utf-8") for name in resources])
    rendered = render({})
    assert rendered.keys() == expected.keys()
    services = [documents["RayService", "consort"] for documents in (rendered, expected)]
    for pod in pods(services[0]).values():
        (container,) = pod["containers"]
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    for pod in pods(services[1]).values():  # which has a ConfigMap, where the chart has `args`
        (container,) = pod["containers"]
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "models"]
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "models"]
    serves = [yaml.safe_load(service["spec"].pop("serveConfigV2")) for service in services]
    given = [serve["applications"][0].pop("args") for serve in serves]
    assert serves[0] == serves[1]
    assert given[0] == {
        "require_api_key": True,
        "config": yaml.safe_load((ROOT / "kubernetes" / "models.yaml").read_text(encoding="utf-8")),
    }
    for service in services:  # Helm sorts names
        service["spec"]["rayClusterConfig"]["workerGroupSpecs"].sort(key=lambda group: group["groupName"])
    assert rendered == expected


@needs_helm
@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_kuberay_and_serve_take_what_it_makes(name: str) -> None:
    values = EXAMPLES.get(name, {})
    documents = render(values)
    service = documents["RayService", "consort"]
    jsonschema.validate(service, RAYSERVICE)
    _, config = served(service)
    offered = {
        resource: int(count)
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        for resource, count in group["resources"].items()
    }
    wanted = {resource for model in config.models.values() for resource in (model.resources or {})}
    assert wanted <= offered.keys()
    claims = {
        volume["persistentVolumeClaim"]["claimName"] for pod in pods(service).values() for volume in pod["volumes"]
    }
    own = {claim for kind, claim in documents if kind == "PersistentVolumeClaim"}
    assert claims == (own or {values.get("weights", {}).get("claim")})


@needs_helm
def test_values_reach_where_they_belong() -> None:
    service = render(EXAMPLES["pools"])["RayService", "consort"]
    application, config = served(service)
    assert list(config.endpoints) == ["code", "large"]  # Helm sorts names
    assert config.models["large"].tensor_parallel == 2
    assert application["deployments"][0]["num_replicas"] == 3
    images = {pod["containers"][0]["image"] for pod in pods(service).values()}
    assert images == {f"registry.example/consort@{EXAMPLES['pools']['image']['digest']}"}
    limits = {name: pod["containers"][0]["resources"]["limits"] for name, pod in pods(service).items()}
    gpus = {name: of.get("nvidia.com/gpu") for name, of in limits.items()}
    assert gpus == {"head": None, "coordinator": None, "h100": "2", "a100": "1", "spot": "1"}
    assert pods(service)["spot"]["tolerations"] == EXAMPLES["pools"]["pools"]["spot"]["tolerations"]
    assert [secret["name"] for secret in pods(service)["head"]["imagePullSecrets"]] == ["registry"]


@needs_helm
def test_large_numbers_stay_integers() -> None:
    _, config = served(render(EXAMPLES["one-gpu"])["RayService", "consort"])
    corpus = config.endpoints["qwen"].corpus
    assert corpus is not None
    assert corpus.max_tokens == 2_000_000


@needs_helm
def test_services_of_ones_own() -> None:
    documents = render(EXAMPLES["own-services"])
    assert {kind for kind, _ in documents} == {"RayService", "NetworkPolicy", "PodDisruptionBudget", "Secret"}
    assert documents["Secret", "consort-key"]["stringData"] == {"key": "change-me"}
    cluster = documents["RayService", "consort"]["spec"]["rayClusterConfig"]
    redis = cluster["gcsFaultToleranceOptions"]
    assert redis["redisAddress"] == "redis.example:6379"
    assert redis["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "shared-redis", "key": "secret"}
    (container,) = pods(documents["RayService", "consort"])["head"]["containers"]
    keys = {entry["name"]: entry.get("valueFrom", {}).get("secretKeyRef") for entry in container["env"]}
    assert keys["CONSORT_API_KEY"] == {"name": "consort-key", "key": "key"}


@needs_helm
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"coordinator": {}}, "coordinator"),
        ({"redis": {"enabled": False}}, "address"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"pools": {"head": {}}}, "head"),
        (
            {"configuration": {"models": {"m": {"path": "p", "resources": {"gpu": 1}}}}},
            "no pool offers it; they offer drafter",
        ),
    ],
)
def test_wrong_values_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        render(copy.deepcopy(change))


@needs_helm
def test_anybody_may_ask_if_values_say_so() -> None:
    service = render({"requireApiKey": False})["RayService", "consort"]
    application, _ = served(service)
    assert application["args"]["require_api_key"] is False
    (container,) = pods(service)["head"]["containers"]
    assert "CONSORT_API_KEY" not in {entry["name"] for entry in container["env"]}
