"""The GPU benchmark runs where little more than torch, transformers, accelerate and msgspec is installed."""

import subprocess
import sys

MISSING = ["bitsandbytes", "click", "fastapi", "matplotlib", "openai", "pydantic", "ray", "rich", "uvicorn", "zmq"]

PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))  # an import of these now fails
from benchmarks.gpu import main
main(["--help"])
"""


def test_the_gpu_benchmark_needs_no_serving_packages() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert "--cpu-drafter" in process.stdout
