"""The words of the code: docstrings that stand by themselves, and variables named after what they hold."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "actors",
    "benchmarks",
    "examples",
    "cli",
    "cluster",
    "consort",
    "decoding",
    "deployments",
    "engine",
    "evaluation",
    "training",
    "tests",
)
RIDDLES = {"at", "found", "one", "place"}  # names of variables that say nothing of what they hold
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every variable, parameter and loop variable that is bound."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store(), lineno=line) | ast.arg(arg=name, lineno=line):
                yield line, name


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_stand_by_themselves(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Documented) and (ast.get_docstring(node) or "").startswith("Of ")
    ]
    assert wrong == [], "begin with a verb or a noun phrase"


@pytest.mark.parametrize("folder", FOLDERS)
def test_variables_are_named_after_what_they_hold(folder: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in (ROOT / folder).rglob("*.py")
        for line, name in named(ast.parse(path.read_text(encoding="utf-8")))
        if name in RIDDLES
    ]
    assert wrong == [], "name the thing: row, draft, index, position, …"
