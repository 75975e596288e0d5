"""The C++ functions of this folder."""

import ctypes
import functools
from pathlib import Path

from decoding.kernels import compiler

# Every product and sum is rounded by itself, as in torch, and −∞ is a number.
_MATHS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_pointer, _size = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "choose_tokens": [*[_pointer] * 3, *[_size] * 4, *[_pointer] * 2],
    "penalise": [_pointer, *[_size] * 2, *[_pointer] * 5, _size, _pointer],
    "restore": [_pointer, *[_size] * 2, *[_pointer] * 3, _size, _pointer],
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions; None if they can't be built."""
    loaded = compiler.load(Path(__file__).parent, _MATHS)
    for name, arguments in _ARGUMENTS.items() if loaded is not None else ():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded
