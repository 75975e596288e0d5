"""Programs for GPU machines need little more than torch, transformers, accelerate, msgspec and llguidance."""

import subprocess
import sys

import pytest

MISSING = ["bitsandbytes", "click", "fastapi", "matplotlib", "openai", "pydantic", "ray", "rich", "uvicorn", "zmq"]

WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"  # an import of these now fails
BENCHMARK = "from benchmarks.__main__ import main; main(['--help'])"
STEPS = (
    "from benchmarks.gpu.__main__ import main\n"
    "sys.exit(main('steps --shape tiny --vocabulary 500 --rows 2 --context 64'.split()))"
)
TESTS = "import pytest; sys.exit(pytest.main(['-c', '/dev/null', '--rootdir=.', '--collect-only', '-q', 'tests/gpu']))"


PROGRAMS = [(BENCHMARK, "--gpu"), (STEPS, "0 of 40 tokens"), (TESTS, "test_a_step_waits_nowhere")]


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_gpu_programs_need_no_serving_packages(program: str, output: str) -> None:
    process = subprocess.run([sys.executable, "-c", WITHOUT + program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert output in process.stdout
