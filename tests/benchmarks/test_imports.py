"""Programs for GPU machines need little more than torch, transformers, accelerate, msgspec and llguidance."""

import subprocess
import sys

MISSING = ["bitsandbytes", "click", "fastapi", "matplotlib", "openai", "pydantic", "ray", "rich", "uvicorn", "zmq"]

WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))\n"  # an import of these now fails
BENCHMARK = """
from benchmarks.__main__ import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
"""
STEPS = """
from benchmarks.gpu.__main__ import main
assert main("steps --shape tiny --vocabulary 500 --rows 2 --context 64".split()) == 0
"""
TESTS = """
import pytest
sys.exit(pytest.main(["-c", "/dev/null", "--rootdir=.", "--collect-only", "-q", "tests/gpu"]))
"""


def test_gpu_programs_need_no_serving_packages() -> None:
    program = WITHOUT + BENCHMARK + STEPS + TESTS  # one after the other in one process: each would import torch again
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    for output in ("--gpu", "0 of 40 tokens", "test_a_step_waits_nowhere"):
        assert output in process.stdout
