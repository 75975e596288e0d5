"""C++ functions for what torch does too slowly on CPUs."""

import ctypes
import functools
from pathlib import Path

from decoding.kernels import compiler

# Flags that let loops over floats be vectorised; -ffast-math would also change rounding in the whole process. On some
# processors gcc splits a multiplication and addition in some loops only, so the same sum would have different bits.
_MATHS = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    *("-fno-math-errno", "-ffinite-math-only", "-freciprocal-math"),
    *("--param", "avoid-fma-max-bits=0"),
)
_FUNCTIONS = "linear", "rms_norm", "rotate", "silu_gate", "activate", "add", "copy"
_TYPES = "float32", "bfloat16"  # each function exists for both


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions of all C++ files in `kernels/`; None if they can't be built, which only costs speed."""
    loaded = compiler.load(Path(__file__).parent / "kernels", _MATHS)
    return None if loaded is None else _typed(loaded)


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    names = [f"{name}_{kind}" for name in _FUNCTIONS for kind in _TYPES]
    for name in (*names, "linear_bfloat16_to_float32", "attend"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [ctypes.c_void_p], None  # a structure
    loaded.replay.argtypes, loaded.replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return loaded
