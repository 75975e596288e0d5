"""Triton's interpreter: kernels run on CPU tensors where there is no GPU. Import it before any kernel.

With a GPU the same tests run there.
"""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _create_dot(builder: object, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Multiply in float64, so that the order of summation, which NumPy chooses by shape, does not show.

    The interpreter's own product takes the bits of bfloat16 for integers.
    """
    left, right = (_as_float64(handle) for handle in (a, b))
    total = np.matmul(left, right) + d.data
    return interpreter.TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


def _as_float64(handle):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)


if DEVICE == "cpu":
    interpreter.InterpreterBuilder.create_dot = _create_dot
