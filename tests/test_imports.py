"""The floor plan: imports point down only, between layers, rooms and files. The contracts are in pyproject.toml."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from deployments.configuration.config import load_config
from deployments.configuration.paths import locate
from engine.loading.settings import load_tokenizer

ROOT = Path(__file__).parents[1]
LAYERS = ("actors", "benchmarks", "cli", "consort", "decoding", "deployments", "engine", "evaluation", "training")
WEB = {"fastapi", "starlette"}
NOT_LOADED = {  # in the order of import, since what one layer loads stays loaded
    "decoding": WEB | {"accelerate", "actors", "bitsandbytes", "deployments", "engine", "ray", "transformers", "zmq"},
    "engine": WEB | {"actors", "deployments", "ray", "zmq"},
    "actors": WEB | {"deployments", "ray"},
}


def check_contracts(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_layers_and_rooms_import_downwards() -> None:
    process = check_contracts(ROOT)
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("module", "source", "contract"),
    [
        ("decoding.sampling.planted", "from actors.verifier.loop import Target", "Layers"),
        ("decoding.sampling.planted", "import ray", "decoding/ is pure torch"),
        ("decoding.sampling.planted", "from decoding.drafts import trie", "Rooms of decoding"),
        ("actors.wire.planted", "from actors.verifier import loop", "Rooms of actors"),
        ("actors.wire.planted", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray", "plain classes"),
        ("actors.planted", "", "Rooms of actors"),
        (
            "deployments.fields.planted",
            "def late():\n    from deployments.http import routes",
            "Rooms of deployments",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(tmp_path: Path, module: str, source: str, contract: str) -> None:
    for file in (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert check_contracts(tmp_path).returncode == 0
    (tmp_path / module.replace(".", "/")).with_suffix(".py").write_text(source, encoding="utf-8")
    process = check_contracts(tmp_path)
    assert process.returncode == 1
    broken = [line for line in process.stdout.splitlines() if line.endswith("BROKEN")]
    assert any(contract in line for line in broken), process.stdout


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*LAYERS, cache_dir=None)
    TopologicalSorter({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}).prepare()


def modules_of(layer: str) -> list[str]:
    files = (file.relative_to(ROOT).with_suffix("") for file in (ROOT / layer).rglob("*.py"))
    return sorted(".".join(file.parts).removesuffix(".__init__") for file in files)


def loaded_in_turn(stages: Iterable[tuple[str, Sequence[str], set[str]]]) -> list[str]:
    """Import each stage's modules in one process. Returns what was loaded then of what must not be, after its name."""
    program = (
        "import importlib, sys\n"
        f"for stage, modules, unwanted in {list(stages)!r}:\n"
        "    for name in modules: importlib.import_module(name)\n"
        "    for name in sorted(unwanted & set(sys.modules)): print(stage, 'loads', name)"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def test_importing_a_layer_loads_none_of_what_it_must_not_know() -> None:
    layers = [(layer, modules_of(layer), unwanted) for layer, unwanted in NOT_LOADED.items()]
    chaos = ("chaos", ["tests.chaos.__main__"], {"ray"})  # whose environment the program sets first
    assert loaded_in_turn([*layers, chaos]) == []


SLOW = {  # in the order of import: each may load all that those before it may
    "cli.serving.server": {"torch", "transformers", "ray", "fastapi"},
    "deployments.http.proxy": {"torch", "transformers", "ray"},
    "deployments.app": {"torch", "transformers"},  # Serve's controller and the command import it
    "deployments.replicas.coordinator deployments.endpoints.service deployments.http.routes": {  # a coordinator
        "transformers.modeling_utils",
        "torch._dynamo",
        "sympy",
    },
}


def test_a_server_starts_without_slow_imports_where_they_are_not_needed() -> None:
    assert loaded_in_turn((modules, modules.split(), unwanted) for modules, unwanted in SLOW.items()) == []


APPLICATION = """
import sys
from deployments.app import build_application
from deployments.configuration.config import load_config
build_application(load_config())
print({"torch", "transformers"} & {*sys.modules})
"""


def test_the_default_application_is_built_without_torch() -> None:
    process = subprocess.run([sys.executable, "-c", APPLICATION], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "set()", process.stderr


COORDINATOR = """
import sys
import deployments.replicas.coordinator
from engine.loading.lean_imports import without_torch
with without_torch():
    from deployments.configuration.config import load_config
    from deployments.endpoints.loading import load_endpoints
    config = load_config()
    endpoints = load_endpoints(config)
import deployments.endpoints.service, deployments.http.live_metrics, deployments.http.routes
print({"torch"} & {*sys.modules}, config.loads_code)
import torch
print(torch.ones(1).item(), *next(iter(endpoints.values())).encoder.tokenizer.encode("Why is the sky blue?"))
"""


def test_a_coordinator_of_the_default_application_needs_no_torch() -> None:
    process = subprocess.run([sys.executable, "-c", COORDINATOR], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lean, tokens = process.stdout.splitlines()
    path = locate(load_config().models["smollm2"].path)
    expected = load_tokenizer(path).encode("Why is the sky blue?")
    assert (lean, tokens) == ("set() False", " ".join(map(str, [1.0, *expected])))
    assert not process.stderr


TARGET = """
import sys
from pathlib import Path
import deployments.replicas.model_replica
from deployments.configuration.config import load_config
from engine.loading.lean_imports import lean_imports
config = load_config()
with lean_imports():
    from actors.replica.replica import ReplicaSpec, load_replica
    import deployments.endpoints.adapters, deployments.monitoring.replica_metrics
    model, heads = config.models["smollm2"].spec("smollm2"), config.heads_of("smollm2")
    runner, _ = load_replica(ReplicaSpec(role="target", model=model, heads=heads))
print("modules", *{"deployments.apis", "deployments.endpoints.endpoint", "pandas", "scipy", "sklearn"} & {*sys.modules})
files = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print("weights", *[file for file in files if file.endswith((".gguf", ".safetensors"))])
print(runner.model.model.embed_tokens.get_submodule("_layer") is runner.model.lm_head)
"""


def test_a_default_target_keeps_no_file_of_weights_and_loads_no_module_of_endpoints() -> None:
    process = subprocess.run([sys.executable, "-c", TARGET], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout.splitlines() == ["modules", "weights", "True"], process.stderr


EVERY_HELP = """
import contextlib, io, sys
import click
from cli.shell import main

def show(command, names):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        command.main([*names, "--help"], standalone_mode=False)
    assert "Usage: " in text.getvalue()

def every(group, names):
    yield names
    for name, command in group.commands.items():
        yield from every(command, [*names, name]) if isinstance(command, click.Group) else [[*names, name]]

for names in every(main, []):
    show(main, names)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
HELP_NEEDS = {
    "actors",
    "cli",
    "click",
    "consort",
    "decoding",
    "deployments",
    "engine",
    "evaluation",
    "rich",
    "training",
}


def test_no_help_text_imports_more_than_the_command_line_itself() -> None:
    def packages(program: str) -> set[str]:
        process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return set(process.stdout.split())

    own = packages('import sys\nprint(*{name.partition(".")[0] for name in sys.modules})')  # what an empty program has
    assert packages(EVERY_HELP) - own - sys.stdlib_module_names - HELP_NEEDS == set()
