"""Users' code is checked strictly against a wheel: all Python examples of the documentation."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def examples() -> dict[str, str]:
    """Return the Python examples by a name for each, such as `python_2`."""
    sources: dict[str, str] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"^````.*?^````$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        sources |= {f"{page.stem.replace('-', '_')}_{i}": block for i, block in enumerate(blocks, 1)}
    return sources


def test_examples_are_python() -> None:
    assert len(examples()) > 4
    for name, source in examples().items():
        compile(source, name, "exec")


@pytest.mark.slow
def test_examples_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """In an environment that has the wheel's files, `py.typed` among them, beside this one's packages."""
    packages, written = tmp_path / "environment", tmp_path / "examples"
    build = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(packages)], check=True)
    site = packages / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    subprocess.run([*build, "--build-lib", str(site)], cwd=ROOT, check=True, capture_output=True)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    written.mkdir()
    for name, source in examples().items():
        (written / f"{name}.py").write_text(source, encoding="utf-8")
    python = ["--python-executable", str(packages / "bin" / "python"), "--config-file", "", "--strict"]
    command = [sys.executable, "-m", "mypy", *python, "--cache-dir", str(tmp_path / "cache"), "."]
    checked = subprocess.run(command, cwd=written, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
