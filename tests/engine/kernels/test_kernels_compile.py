"""Triton kernels compile for GPUs of two generations, without one: to machine code whose registers suffice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = {
    *("_write", "_attend_to_parts", "merge_parts", "_bound", "_choose"),
    *("_multiply", "_multiply_codes", "_multiply_experts", "_normalise", "_rotate", "_silu_gate"),
    *("_convolve", "_recur", "_store_inputs"),
}
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # of a program, CUDA C++ Programming Guide, table "compute capabilities"


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_compiler"],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    for architecture, shared_bytes in SHARED_BYTES.items():
        compiled = [kernel for kernel in kernels if kernel["architecture"] == architecture]
        assert {kernel["kernel"] for kernel in compiled} == KERNELS
        for kernel in compiled:
            # Of a thread: what its registers did not hold.
            assert kernel["stack_bytes"] <= (128 if kernel["case"] == "wide groups" else 64), kernel
            assert kernel["shared_bytes"] <= shared_bytes, kernel
            if kernel["kernel"] in ("_attend_to_parts", "_multiply", "_multiply_codes", "_multiply_experts"):
                assert kernel["products"], kernel  # by tensor cores
                assert kernel["asynchronous_copies"], kernel  # the next block is read meanwhile
