"""Imports point down only: deployments -> actors -> decoding. The test and the linter forbid the same."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HIGHER = {"benchmarks", "deployments", "evaluation", "training"}
WEB = {"fastapi", "starlette"}
FORBIDDEN = {
    "decoding": HIGHER | WEB | {"accelerate", "actors", "bitsandbytes", "ray", "transformers", "zmq"},
    "actors": HIGHER | WEB | {"ray"},
}


def imported_modules(source: str) -> Iterator[str]:
    """Every module that the source imports, wherever the statement stands, relative ones with their dots."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, level=level):
                yield "." * level + (module or "")
            case ast.Call(func=ast.Name(id="__import__" | "import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield name


def wrong_imports(root: Path, layer: str) -> list[str]:
    """`path: module` for each import in the layer's folder that it must not have."""
    return [
        f"{path}: {module}"
        for path in sorted(file.relative_to(root).as_posix() for file in (root / layer).rglob("*.py"))
        for module in imported_modules((root / path).read_text(encoding="utf-8"))
        if module.startswith(".") or module.split(".")[0] in FORBIDDEN[layer]
    ]


def modules_of(layer: str) -> list[str]:
    files = (file.relative_to(ROOT).with_suffix("") for file in (ROOT / layer).rglob("*.py"))
    return sorted(".".join(file.parts).removesuffix(".__init__") for file in files)


def loaded_after(modules: list[str], *, watched: set[str]) -> list[str]:
    """Which of the watched packages a fresh interpreter has loaded once it has imported the modules."""
    program = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted({watched!r} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.split()


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_no_layer_imports_upward(layer: str) -> None:
    assert wrong_imports(ROOT, layer) == []


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_the_linter_forbids_the_same(layer: str) -> None:
    settings = tomllib.loads((ROOT / layer / "ruff.toml").read_text(encoding="utf-8"))
    assert set(settings["lint"]["flake8-tidy-imports"]["banned-api"]) == FORBIDDEN[layer]


PLANTED = [
    ("decoding/planted.py", "import ray", "ray"),
    ("decoding/planted.py", "from ray import serve", "ray"),
    ("decoding/planted.py", "import torch, transformers.cache_utils", "transformers.cache_utils"),
    ("decoding/planted.py", "def late():\n    from actors.target import Target", "actors.target"),
    ("decoding/planted.py", "if TYPE_CHECKING:\n    import zmq", "zmq"),
    ("decoding/deeper/planted.py", "import deployments", "deployments"),
    ("actors/planted.py", "from deployments.configuration.config import Config", "deployments.configuration.config"),
    ("actors/planted.py", "import ray", "ray"),
]


@pytest.mark.parametrize(("path", "source", "found"), PLANTED)
def test_a_planted_import_is_found(tmp_path: Path, path: str, source: str, found: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    assert wrong_imports(tmp_path, path.split("/")[0]) == [f"{path}: {found}"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from . import noise", "."),
        ("from ..actors import target", "..actors"),
        ('import importlib\nimportlib.import_module("ray.serve")', "ray.serve"),
        ('__import__("fastapi")', "fastapi"),
    ],
)
def test_a_hidden_import_is_found(tmp_path: Path, source: str, found: str) -> None:
    (tmp_path / "decoding").mkdir()
    (tmp_path / "decoding" / "planted.py").write_text(source, encoding="utf-8")
    assert wrong_imports(tmp_path, "decoding") == [f"decoding/planted.py: {found}"]


@pytest.mark.parametrize(("path", "source", "found"), PLANTED)
def test_the_linter_finds_a_planted_import(path: str, source: str, found: str) -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--select",
        "TID251",
        "--stdin-filename",
        path,
        "-",
    ]
    process = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stdout + process.stderr
    assert "TID251" in process.stdout


def test_importing_decoding_loads_only_torch() -> None:
    assert loaded_after(modules_of("decoding"), watched=FORBIDDEN["decoding"]) == []


def test_importing_actors_does_not_load_ray() -> None:
    assert loaded_after(modules_of("actors"), watched=FORBIDDEN["actors"]) == []
