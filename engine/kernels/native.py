"""C++ functions for what torch does too slowly on CPUs, and calls of them, which may be recorded to run again."""

import ctypes
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from decoding.kernels import compiler
from engine.kernels.operator_trace import as_one_operator

# Flags that let loops over floats be vectorised; -ffast-math would also change rounding in the whole process. On some
# processors gcc splits a multiplication and addition in some loops only, so the same sum would have different bits.
_MATHS = (
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"),
    *("-fno-math-errno", "-ffinite-math-only", "-freciprocal-math"),
    *("--param", "avoid-fma-max-bits=0"),
)
_FUNCTIONS = (
    *("linear", "rms_norm", "rotate", "angles", "silu_gate", "activate"),
    *("add", "copy", "convolve", "add_weighted"),
)
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # each function exists for both, by these names
_MOST_DIMENSIONS = 4

P = ParamSpec("P")
R = TypeVar("R")

_native_operators: set[Callable[..., Any]] = set()


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the functions of all C++ files in `cpp/`; None if they can't be built, which only costs speed."""
    loaded = compiler.load(Path(__file__).parent / "cpp", _MATHS)
    return None if loaded is None else _typed(loaded)


def _typed(loaded: ctypes.CDLL) -> ctypes.CDLL:
    names = [f"{name}_{kind}" for name in _FUNCTIONS for kind in KINDS.values()]
    quantized = (f"quantized_{name}" for name in ("linear", "rows", "experts"))
    others = "linear_bfloat16_to_float32", "attend", "recur", "move_rows", "count", "widen"
    for name in (*names, *quantized, *others):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [ctypes.c_void_p], None  # a structure
    loaded.replay.argtypes, loaded.replay.restype = [ctypes.c_void_p, ctypes.c_int64], None
    return loaded


class ResultMemory:
    """Blocks of memory. A block that nothing holds is given to later results, so recordings need little."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes, a power of two
        self._used: dict[int, Tensor] = {}  # by address
        self._holders: Counter[int] = Counter()  # by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, whose memory `drop_unheld` takes back unless it is held."""
        size = torch.Size(shape).numel() * dtype.itemsize
        rounded = 1 << max(size - 1, 0).bit_length()
        free = self._free[rounded]
        block = free.pop() if free else torch.empty(rounded, dtype=torch.uint8)
        self._used[block.data_ptr()] = block
        return block[:size].view(dtype).view(shape)

    def hold(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor. Views of the same memory hold it together."""
        self._holders[tensor.untyped_storage().data_ptr()] += 1

    def drop(self, tensor: Tensor) -> None:
        """Undo one `hold`."""
        self._holders[tensor.untyped_storage().data_ptr()] -= 1

    def drop_unheld(self) -> None:
        """Take back what nothing holds, such as copies that an operator made for itself."""
        for address in [address for address in self._used if not self._holders[address]]:
            block = self._used.pop(address)
            self._free[len(block)].append(block)

    def drop_all(self) -> None:
        """Take back all memory, before another recording."""
        self._holders.clear()
        self.drop_unheld()


def native_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Let traces take a function as a single operator.

    To be replayed it must compute by `call` alone, in memory from `empty`, and its Python may depend on shapes and
    constants only.
    """
    _native_operators.add(function)
    return as_one_operator(function)


def is_native(target: object) -> bool:
    """Whether the target of a traced call is a native operator."""
    return target in _native_operators


def structure(fields: str) -> type[ctypes.Structure]:
    """Return the type of a native function's arguments: *pointers, .floats, and integers of 64 bits."""
    kinds: dict[str, Any] = {"*": ctypes.c_void_p, ".": ctypes.c_float}

    class Arguments(ctypes.Structure):
        _fields_ = [(field.lstrip("*."), kinds.get(field[0], ctypes.c_int64)) for field in fields.split()]

    return Arguments


def call(name: str, arguments: ctypes.Structure) -> None:
    """Call a native function by its name in C++."""
    call_function(getattr(library(), name), arguments)


def call_function(function: Any, arguments: ctypes.Structure) -> None:
    """Call a function of any library that takes a structure."""
    recording = _current.get()
    if recording is not None:
        recording.calls.append(_NativeCall(function, arguments))
    function(ctypes.byref(arguments))


def is_recording() -> bool:
    """Whether calls are recorded now."""
    return _current.get() is not None


def share_memory(results: Iterable[Tensor], given: Iterable[Tensor]) -> bool:
    """Whether all results, at least one, are views of what was given."""
    memory = {tensor.untyped_storage().data_ptr() for tensor in given if tensor.layout == torch.strided}
    addresses = [tensor.untyped_storage().data_ptr() for tensor in results]
    return bool(addresses) and memory.issuperset(addresses)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for a result, on the CPU."""
    recording = _current.get()
    if recording is None:
        return torch.empty(shape, dtype=dtype)
    return recording.memory.empty(shape, dtype)


class _NativeCall(NamedTuple):
    function: Any
    arguments: ctypes.Structure


class _Step(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("call", ctypes.c_void_p)]


class Recording:
    """Calls in the order in which they were made. It keeps native ones' arguments alive, at the same addresses."""

    def __init__(self, memory: ResultMemory) -> None:
        """memory: for results."""
        self.memory = memory
        self.calls: list[_NativeCall | Callable[[], object]] = []
        self._parts: list[Callable[[], object]] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls made meanwhile in this context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def then(self, function: Callable[[], object]) -> None:
        """Add a call of a Python function."""
        self.calls.append(function)

    def replay(self) -> None:
        """Make the same calls again, with what their arguments point to now."""
        if self._parts is None:
            groups = [list(calls) for _, calls in groupby(self.calls, lambda each: isinstance(each, _NativeCall))]
            self._parts = [part for calls in groups for part in _parts(calls)]
        for part in self._parts:
            part()


def _parts(calls: Sequence[Any]) -> Sequence[Callable[[], object]]:
    """Return native calls, one after another, as one function; others as they are."""
    if not isinstance(calls[0], _NativeCall):
        return calls
    steps = [_Step(ctypes.cast(each.function, ctypes.c_void_p), ctypes.addressof(each.arguments)) for each in calls]
    native = library()
    assert native is not None
    return [functools.partial(native.replay, (_Step * len(steps))(*steps), len(steps))]


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


_AddCall = structure("*left *right size threads *output")


class _CopyCall(ctypes.Structure):
    _fields_ = [
        ("from", ctypes.c_void_p),
        *((name, ctypes.c_int64 * (_MOST_DIMENSIONS - 1)) for name in ("sizes", "strides")),
        ("size", ctypes.c_int64),
        ("to", ctypes.c_void_p),
    ]


def add(left: Tensor, right: Any) -> Tensor:
    """Like `torch.add`, which is called where no native function fits."""
    alike = isinstance(right, Tensor) and left.shape == right.shape and left.dtype == right.dtype
    if not alike or left.dtype not in KINDS or not left.is_contiguous() or not right.is_contiguous():
        result: Tensor = torch.add(left, right)
        return result
    output = empty(*left.shape, dtype=left.dtype)
    addresses = left.data_ptr(), right.data_ptr()
    arguments = _AddCall(*addresses, left.numel(), torch.get_num_threads(), output.data_ptr())
    call(f"add_{KINDS[left.dtype]}", arguments)
    return output


def contiguous(x: Tensor) -> Tensor:
    """Like `x.contiguous()`; native in recordings, where possible."""
    copies = is_recording() and not x.is_contiguous()
    if not copies or x.dtype not in KINDS or x.stride(-1) != 1 or x.dim() > _MOST_DIMENSIONS:
        return x.contiguous()
    missing = _MOST_DIMENSIONS - x.dim()
    output = empty(*x.shape, dtype=x.dtype)
    sizes, strides = [1] * missing + list(x.shape[:-1]), [0] * missing + list(x.stride()[:-1])
    three = ctypes.c_int64 * (_MOST_DIMENSIONS - 1)
    call(
        f"copy_{KINDS[x.dtype]}",
        _CopyCall(x.data_ptr(), three(*sizes), three(*strides), x.shape[-1], output.data_ptr()),
    )
    return output


@native_operator
def join(left: Tensor, right: Tensor) -> Tensor:
    """Like `torch.cat` of two tensors of one shape along the last dimension; native in recordings, where possible."""
    if not is_recording() or left.dtype not in KINDS or left.shape != right.shape or left.dtype != right.dtype:
        return torch.cat([left, right], dim=-1)
    size, parts = left.shape[-1], (contiguous(left), contiguous(right))
    output = empty(*left.shape[:-1], 2 * size, dtype=left.dtype)
    three, line = ctypes.c_int64 * (_MOST_DIMENSIONS - 1), size * left.itemsize
    for index in range(2 * (left.numel() // size)):
        source = parts[index % 2].data_ptr() + index // 2 * line
        arguments = _CopyCall(source, three(1, 1, 1), three(), size, output.data_ptr() + index * line)
        call(f"copy_{KINDS[left.dtype]}", arguments)
    return output
