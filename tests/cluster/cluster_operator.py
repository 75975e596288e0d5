"""What an operator does on the laptop of a fleet: Ray's own commands, with the project's own files."""

import copy
import json
import time
from collections.abc import Callable
from typing import Any

import yaml

from deployments.configuration.paths import ROOT
from deployments.http.admin_routes import ScaleRequest
from tests.cluster.fleet import ADDRESSES, SERVERS, Fleet

_CLUSTER = "/run/home/cluster.yaml"
_ROLES = {"target": "Target-target", "drafter": "Drafter-drafter", "coordinator": "Coordinator"}
_NODES = """
import json, ray
ray.init(address="auto", log_to_driver=False, logging_level="error")
print(json.dumps({node["NodeManagerAddress"]: node["Resources"] for node in ray.nodes() if node["Alive"]}))
"""


def read(file: str) -> str:
    """The text of a file of the checkout."""
    return (ROOT / file).read_text(encoding="utf-8")


class Operator:
    """Brings one of the cluster files up on a fleet, and says what became of it."""

    def __init__(
        self, fleet: Fleet, file: str, *, patch: Callable[[str], str] = read, http: str = "head", **changes: Any
    ) -> None:
        """
        patch: gives the text of a file of the checkout as the operator has changed it.
        http: the machine that clients ask.
        changes: of the file, where the fleet differs from real hosts. It has no package index to install from.
        """
        self._fleet, self._url = fleet, f"http://{ADDRESSES[http]}:8000"
        cluster = yaml.safe_load(patch(file)) | changes
        cluster["setup_commands"] = [line for line in cluster["setup_commands"] if "install.sh" not in line]
        self._serve = yaml.safe_load(patch("serve.yaml"))
        self._serve["applications"][0]["args"]["require_api_key"] = False
        fleet.write("laptop", _CLUSTER, yaml.safe_dump(cluster))
        fleet.write("laptop", "~/.consort/ray-token", "0123456789abcdef" * 4)

    def up(self) -> None:
        self._on_laptop(f"ray up --yes {_CLUSTER}")

    def configure(self, **changes: dict[str, Any]) -> None:
        """Change the models that `deploy` deploys, by name."""
        config = yaml.safe_load((ROOT / "deployments" / "cluster.yaml").read_text(encoding="utf-8"))
        for name, model in config["models"].items():
            tiny = {"path": f"models/{name}", "dtype": "float32"}  # from where Ray was started
            model |= tiny | changes.get(name, {})
        self._serve["applications"][0]["args"]["config"] = config

    def deploy(self, **replicas: int) -> None:
        """`serve deploy serve.yaml`, with this many replicas of the roles that are named; others follow the load."""
        serve = copy.deepcopy(self._serve)
        for role, count in replicas.items():
            fixed = {"name": _ROLES[role], "num_replicas": count, "autoscaling_config": None}
            serve["applications"][0]["deployments"].append(fixed)
        self._fleet.write("laptop", "~/serve.yaml", yaml.safe_dump(serve))
        self._on_laptop(f"ray rsync-up {_CLUSTER} ~/serve.yaml '~/consort/serve.yaml'")
        self._on_laptop(f"ray exec {_CLUSTER} 'cd consort && serve deploy serve.yaml'")

    def scale(self, model: str, replicas: int, *, status: int = 200) -> None:
        """Scale a model by hand, by a client's request, which is answered with the status."""
        body = ScaleRequest(model=model, replicas=replicas).model_dump_json()
        command = f"curl --silent --write-out '\\n%{{http_code}}' --json @- {self._url}/scale"
        answer = self._fleet.run("client", command, stdin=body)
        assert answer.endswith(f"\n{status}"), answer

    def down(self) -> None:
        self._on_laptop(f"ray down --yes {_CLUSTER}")

    def nodes(self) -> dict[str, dict[str, float]]:
        """The resources of the nodes that have joined, by machine."""
        names = {address: name for name, address in ADDRESSES.items()}
        resources_by_address = json.loads(self._fleet.run("head", "python -", stdin=_NODES))
        return {names[address]: resources for address, resources in resources_by_address.items()}

    def roles(self) -> dict[str, list[str]]:
        """The roles of the replicas that run on each machine that can be reached."""
        roles_by_host: dict[str, list[str]] = {}
        for name in SERVERS:
            if name not in self._fleet.off:
                roles = [
                    r for r, title in _ROLES.items() if self._fleet.processes(name, f"ServeReplica:consort:{title}")
                ]
                roles_by_host |= {name: roles} if roles else {}
        return roles_by_host

    def models(self) -> set[str]:
        """The models that clients find."""
        answer = self._fleet.run("client", f"curl --silent --fail --max-time 5 {self._url}/health || true")
        return {model for model, up in json.loads(answer)["models"].items() if up} if answer else set()

    def ready(self) -> bool:
        """Whether clients find both models."""
        return self.models() == {"target", "drafter"}

    def ask(self, seconds: float) -> list[dict[str, Any]]:
        """What a client's requests came to (tests/cluster/ask.py), by case."""
        command = f"cd {ROOT} && python -m tests.cluster.ask {self._url} {seconds}"
        answers: list[dict[str, Any]] = json.loads(self._fleet.run("client", command, timeout_s=300))
        return answers

    def streams(self) -> int:
        """The client's open connections to the server."""
        return len(self._fleet.run("client", "ss -Htn state established dport = :8000").splitlines())

    def logs(self) -> str:
        """The ends of the logs that tell why something did not happen."""
        command = (
            "cd /tmp/ray/session_latest/logs && tail -n 40 monitor.log serve/controller*.log serve/replica*.log || true"
        )
        return self._fleet.run("head", command)

    def wait(self, condition: Callable[[], bool], what: str, *, timeout_s: float = 120) -> None:
        """Return when the condition holds, and print how long it took; fails, with the logs, if it takes too long."""
        begun_s = time.monotonic()
        while not condition():
            waited_s = time.monotonic() - begun_s
            assert waited_s < timeout_s, f"waited {timeout_s} s in vain: {what}\n{self.roles()}\n{self.logs()}"
            time.sleep(1)
        print(f"{time.monotonic() - begun_s:6.1f} s until: {what}")

    def _on_laptop(self, command: str) -> None:
        self._fleet.run("laptop", f"cd {ROOT} && {command} 2>&1", timeout_s=180)
