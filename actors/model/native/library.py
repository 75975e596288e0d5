"""C++ functions for what torch does too slowly on CPUs."""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoding.kernels import compiler

# Flags that let loops over floats be vectorised; -ffast-math would also change rounding in the whole process. On some
# processors gcc splits a multiplication and addition in some loops only, so the same sum would have different bits.
_MATHS = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    *("-fno-math-errno", "-ffinite-math-only", "-freciprocal-math"),
    *("--param", "avoid-fma-max-bits=0"),
)
_pointer, _size, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_ARGUMENTS: dict[str, Sequence[Any]] = {  # each function exists for both types of numbers
    "linear": [_pointer, _pointer, _pointer, _size, _size, _size, _size, _pointer],
    "rms_norm": [_pointer, _pointer, _number, _size, _size, _size, _pointer],
    "rotate": [_pointer] * 7,
    "silu_gate": [_pointer, _size, _size, _size, _pointer],
}
_TYPES = ("float32", "bfloat16")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions of all C++ files in this folder; None if they can't be built, which only costs speed."""
    loaded = compiler.load(Path(__file__).parent, _MATHS)
    return None if loaded is None else _typed(loaded)


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    loaded.attend.argtypes, loaded.attend.restype = [_pointer], None
    functions = {f"{name}_{kind}": arguments for name, arguments in _ARGUMENTS.items() for kind in _TYPES}
    functions["linear_bfloat16_to_float32"] = _ARGUMENTS["linear"]
    for name, arguments in functions.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
