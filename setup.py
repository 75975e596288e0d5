"""Lays the checkout's folders out as one import package, `consort`, so that an installation claims no other name.

In a wheel `actors/wire/link.py` is `consort/actors/wire/link.py`, and imports say `from consort.actors…`. An editable
installation leaves the folders where they are. What belongs to the checkout alone (benchmarks, cluster files, tests) is
not in wheels.
"""

import ast
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

PACKAGE = "consort"
SHIPPED = ("actors", "cli", "decoding", "deployments", "engine", "evaluation", "training")
DATA_FOLDERS = ("models", "playground")
OF_THE_CHECKOUT = ("benchmarks", "cluster")
DATA: Mapping[str, Sequence[str]] = {  # beside Python: files of a package, by patterns
    "engine.kernels": ["cpp/*"],
    "decoding.kernels": ["*.cpp"],
    "deployments": ["*.yaml", "apis/*.yaml", "endpoints/*.jinja", "strategies/*.jinja"],
    "models": ["*.yaml", "*.jsonl", "requirements.txt", "*/*.json", "*/*.jsonl", "*/*.jinja", "*/*.safetensors"],
    "playground": ["**/*"],
}

_ROOTS = re.compile(rf"({'|'.join((*SHIPPED, *OF_THE_CHECKOUT))})\b")
_MODULE_IN_TEXT = re.compile(rf"({'|'.join(SHIPPED)})(\.\w+)+(:\w+)?")


@dataclass(frozen=True, slots=True)
class Layout:
    """Which packages there are, which folder each is in, and the data files of each."""

    packages: Sequence[str]
    package_dir: Mapping[str, str]
    package_data: Mapping[str, Sequence[str]]


def checkout_layout(root: Path) -> Layout:
    """Return the layout of an editable installation: every folder is a package of its own."""
    return Layout(_packages(root, (PACKAGE, *SHIPPED, *OF_THE_CHECKOUT)), {}, {})


def wheel_layout(root: Path) -> Layout:
    """Return the layout of a wheel: `consort`, with everything else below it."""
    shipped = _packages(root, SHIPPED)
    return Layout(
        packages=[PACKAGE, *(f"{PACKAGE}.{name}" for name in DATA_FOLDERS), *(f"{PACKAGE}.{name}" for name in shipped)],
        package_dir={PACKAGE: PACKAGE, **{f"{PACKAGE}.{name}": name for name in (*DATA_FOLDERS, *SHIPPED)}},
        package_data={PACKAGE: ["py.typed"], **{f"{PACKAGE}.{name}": patterns for name, patterns in DATA.items()}},
    )


def _packages(root: Path, folders: Sequence[str]) -> list[str]:
    packages: list[str] = find_packages(str(root), include=[*folders, *(f"{name}.*" for name in folders)])
    return packages


def below_consort(source: str) -> str:
    """Return a module's source with imports from our folders turned into imports from `consort`. Lines stay lines.

    Raises ValueError if it imports what no wheel has, binds a folder's name, or names one of our modules in a text,
    which this can't follow.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if _ROOTS.match(module):
                if not module.startswith(SHIPPED):
                    raise ValueError(f"line {node.lineno}: no wheel has {module}")
                line = lines[node.lineno - 1]
                lines[node.lineno - 1] = line.replace(f"from {module} import", f"from {PACKAGE}.{module} import", 1)
                if lines[node.lineno - 1] == line:
                    raise ValueError(f"line {node.lineno}: write `from {module} import` on one line")
            case ast.Import(names=names) if any(_ROOTS.match(name.name) for name in names):
                raise ValueError(f"line {node.lineno}: write `from … import …`, which binds no folder's name")
            case ast.Constant(value=str(text)) if _MODULE_IN_TEXT.fullmatch(text):
                raise ValueError(f"line {node.lineno}: {text!r} has another name in a wheel; use __name__")
    return "".join(lines)


class BuildBelowConsort(build_py):
    """Copies packages into a wheel, and makes their imports fit."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)  # of an earlier build
        super().run()

    def build_module(self, module: str, module_file: str, package: str | list[str]) -> tuple[str, bool]:
        """Copy one module."""
        copied, _ = super().build_module(module, module_file, package)
        try:
            text = below_consort(Path(module_file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{module_file}: {error}") from error
        Path(copied).write_text(text, encoding="utf-8")
        return copied, True


if __name__ == "__main__":
    checkout = Path(__file__).parent
    layout = checkout_layout(checkout) if "editable_wheel" in sys.argv else wheel_layout(checkout)
    setup(
        packages=layout.packages,
        package_dir=layout.package_dir,
        package_data=layout.package_data,
        include_package_data=False,  # only what is named here
        cmdclass={"build_py": BuildBelowConsort},
    )
