"""The benchmark of Triton kernels runs, in the interpreter and with small shapes."""

from collections.abc import Callable

import pytest

from tests.support.interpreter import DEVICE

from benchmarks.gpu import kernels  # isort: skip
from benchmarks.gpu.kernels import KernelTime  # isort: skip


def run_once(name: str, kernel: Callable[[], object], plain: Callable[[], object], least_bytes: int) -> KernelTime:
    kernel()
    plain()
    return KernelTime(name, 1e-6, 2e-6, least_bytes)


def test_every_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"_DEVICE": DEVICE, "_HEADS": 4, "_KV_HEADS": 2, "_HEAD_DIM": 16, "_HIDDEN": 32, "_VOCAB": 300}
    small |= {"_FEATURES": {"down": (48, 32), "output": (32, 300)}, "_BATCHES": ((2, 3, 80),), "_time": run_once}
    small |= {"_ROWS": (4,), "_TOKENS": (1,)}
    for name, value in small.items():
        monkeypatch.setattr(kernels, name, value)
    lines = [str(time) for time in kernels.kernel_times()]
    assert [line.split()[0] for line in lines] == ["attention", *["choice"] * 4, *["product,"] * 2, "norm,"]
