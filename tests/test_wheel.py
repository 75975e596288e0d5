"""A wheel holds one import package with all that Consort needs, and works beside packages of the same names as ours."""

import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from setup import DATA, DATA_FOLDERS, SHIPPED, below_consort
from tests.support.commands import running

ROOT = Path(__file__).parents[1]
THEIRS = (*SHIPPED, "benchmarks", "cluster", "models")  # names of packages that users may have
CHAT = """
from consort import Client, LLM, SamplingParams
params = SamplingParams(max_tokens=12, seed=5, temperature=0.8)
prompts = ["def add(a, b):", "class Stack:"]
served = [answer.text for answer in Client({url!r}).generate(prompts, params)]
with LLM.from_config("models/tiny.yaml") as llm:
    assert [answer.text for answer in llm.generate(prompts, params)] == served
assert Client({url!r}).chat([{{"role": "user", "content": "Write add"}}], params).text
print(*served)
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from actors.wire import link\n", "from consort.actors.wire import link\n"),
        ("if True:\n    from deployments import app", "if True:\n    from consort.deployments import app"),
        ("from consort.llm import LLM", "from consort.llm import LLM"),
        ("from training.texts import (\n    a,\n)", "from consort.training.texts import (\n    a,\n)"),
        ('"""from actors import x"""\nimport os', '"""from actors import x"""\nimport os'),
        ("import evaluations", "import evaluations"),
        ("from actors_of_mine import x", "from actors_of_mine import x"),
    ],
)
def test_imports_come_from_one_package(source: str, expected: str) -> None:
    assert below_consort(source) == expected


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os\nimport actors.wire", "line 2: write `from … import …`"),
        ("from benchmarks import report", "line 1: no wheel has benchmarks"),
        ("from  actors import wire", "line 1: write `from actors import` on one line"),
        ("x = 'deployments.http.proxy:middlewares'", "use __name__"),
        ("x = 'decoding.errors'", "use __name__"),
    ],
)
def test_what_can_not_be_followed_is_an_error(source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        below_consort(source)


def test_a_wheel_has_all_files_and_one_package(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(tmp_path / "base")]
    subprocess.run([*command, "--build-lib", str(tmp_path / "lib")], cwd=ROOT, check=True, capture_output=True)
    built = {str(path.relative_to(tmp_path / "lib")) for path in (tmp_path / "lib").rglob("*") if path.is_file()}
    modules = {f"consort/{file.relative_to(ROOT)}" for name in SHIPPED for file in (ROOT / name).rglob("*.py")}
    own = {str(file.relative_to(ROOT)) for file in (ROOT / "consort").glob("*.py")} | {"consort/py.typed"}
    tracked = ["git", "ls-files", *SHIPPED, *DATA_FOLDERS]
    listed = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    data = {f"consort/{file}" for file in listed if not file.endswith((".py", ".md"))}
    assert built == modules | own | data
    assert all(
        any((ROOT / name.replace(".", "/")).glob(pattern)) for name, patterns in DATA.items() for pattern in patterns
    )
    for file in modules:
        source = (tmp_path / "lib" / file).read_text(encoding="utf-8")
        assert not re.search(rf"^\s*(from|import) ({'|'.join(THEIRS)})\b", source, re.MULTILINE), file


@dataclass(frozen=True)
class Installation:
    """A wheel in an environment of its own, and a folder whose packages must not be imported."""

    python: Path
    folder: Path

    def run(self, *command: str) -> str:
        """Run a command of the environment in the folder, and return what it prints."""
        done = subprocess.run(
            [str(self.python.with_name(command[0])), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON"))}
        return {**inherited, "COLUMNS": "200"}


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Dependencies are those of this environment; the checkout can't be imported."""
    root = tmp_path_factory.mktemp("installation")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # A source distribution first, as a release is made: it must have all that a wheel is built from.
    subprocess.run([sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(root)], cwd=ROOT, check=True)
    (source,) = root.glob("*.tar.gz")
    subprocess.run([*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", str(root), str(source)], check=True)
    (wheel,) = root.glob("*.whl")
    assert wheel.stat().st_size < 60e6
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {
            "consort",
            f"{wheel.name.split('-py3')[0]}.dist-info",
        }
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
    python = root / "venv" / "bin" / "python"
    libraries = root / "venv" / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    install = ["--python", str(python), "install", "--no-deps", "--ignore-installed", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    folder = root / "project"
    for name in THEIRS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"raise RuntimeError('{name} is the user\\'s own')\n", encoding="utf-8"
        )
    return Installation(python, folder)


@pytest.fixture(scope="module")
def url(installation: Installation) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(installation.python.with_name("consort")), "serve", "models/tiny.yaml", "--port", str(port)]
    with running(command, cwd=installation.folder, env=installation.environment, stop=signal.SIGINT) as process:
        assert process.stdout is not None
        assert any("Ctrl-C stops the server" in line for line in process.stdout)
        yield f"http://127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_installation_knows_its_files(installation: Installation) -> None:
    for command in ("demo", "serve", "bench", "models", "compare", "chat", "train"):
        assert "Usage: consort" in installation.run("consort", command, "--help")
    assert "models/smollm2-eagle3" in installation.run("consort", "models")
    assert "the configuration can be served" in installation.run("consort", "serve", "--dry-run", "models/tiny.yaml")
    prompts = "from consort.evaluation.prompts import *; from consort.deployments.configuration.paths import ROOT; "
    prompts += "print(*read_prompts(ROOT / 'models' / 'heldout.jsonl', 1))"
    assert installation.run("python", "-c", prompts).strip()
    assert "Usage: consort" in installation.run("python", "-m", "consort", "--help")


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_an_installation_serves_and_chats(installation: Installation, url: str) -> None:
    assert installation.run("python", "-c", CHAT.format(url=url)).strip()
    assert "consort" in installation.run("consort", "models", "--url", url)
    page = installation.run("python", "-c", f"import urllib.request as r; print(r.urlopen({url!r}).read().decode())")
    assert "<html" in page
