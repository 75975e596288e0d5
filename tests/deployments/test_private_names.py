"""Every private name of Ray that is used, so that a new version of Ray is known to have them, and nothing undeclared.

The upper bound on Ray in pyproject.toml is raised once these tests pass with the next version.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from deployments.configuration.paths import ROOT

PACKAGES = (
    "actors",
    "benchmarks",
    "cli",
    "cluster",
    "consort",
    "decoding",
    "deployments",
    "engine",
    "evaluation",
    "training",
)
PRIVATE = {
    "ray._private.node:Node",
    "ray._private.state:actors",
    "ray.experimental.internal_kv:_internal_kv_get",
    "ray.experimental.internal_kv:_internal_kv_put",
    "ray.serve._private.api:_create_controller_and_proxy_refs",
    "ray.serve._private.common:DeploymentID",
    "ray.serve.context:_get_global_client",
}
# What is used of private classes, by the class that has it.
MEMBERS = {
    "ray._private.node:Node": {"start_api_server", "start_log_monitor", "start_monitor"},
    "ray.serve._private.controller:ServeController": {
        "apply_config",
        "get_app_configs",
        "get_deployment_config",
        "get_serve_instance_details",
        "update_deployment_replicas",
    },
}
# Imported where a feature asks for them, and absent otherwise, or by programs of their own environment.
ELSEWHERE = {"vllm", "psutil"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def imports() -> Iterator[tuple[str, str]]:
    """Module and name of every import of another package."""
    for _, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                yield from ((node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)


def test_all_private_names_of_ray_are_listed() -> None:
    used = {
        f"{module}:{name}"
        for module, name in imports()
        if module.split(".")[0] == "ray" and any(part.startswith("_") for part in (*module.split("."), name) if part)
    }
    assert used == PRIVATE


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_ray_has_the_private_names(name: str) -> None:
    module, _, attribute = name.partition(":")
    assert hasattr(import_module(module), attribute)


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_ray_has_the_members_of_private_classes(name: str) -> None:
    module, _, attribute = name.partition(":")
    cls = getattr(import_module(module), attribute)
    cls = getattr(cls, "__ray_metadata__", cls)
    cls = getattr(cls, "modified_class", cls)
    assert {member for member in MEMBERS[name] if not hasattr(cls, member)} == set()


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {_normal(re.split(r"[<>=\[; ]", requirement)[0]) for group in groups for requirement in group}
    distributions = packages_distributions()
    roots = {module.split(".")[0] for module, _ in imports()} - set(sys.stdlib_module_names) - set(PACKAGES)
    undeclared = {
        root for root in roots - ELSEWHERE if not {root, *map(_normal, distributions.get(root, []))} & declared
    }
    assert undeclared == set()


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")
