"""Calls of native functions, which may be recorded to run again without the Python around them."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from engine.model.native.library import library
from engine.model.native.result_memory import ResultMemory
from engine.model.operator_trace import as_one_operator

P = ParamSpec("P")
R = TypeVar("R")

_native_operators: set[Callable[..., Any]] = set()


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


def call(name: str, arguments: ctypes.Structure) -> None:
    """Call a native function by its name in C++."""
    function = getattr(library(), name)
    recording = _current.get()
    if recording is not None:
        recording.calls.append((function, arguments))
    function(ctypes.byref(arguments))


def is_recording() -> bool:
    """Whether calls are recorded now."""
    return _current.get() is not None


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor for a result, on the CPU."""
    recording = _current.get()
    if recording is None:
        return torch.empty(shape, dtype=dtype)
    return recording.memory.empty(shape, dtype)


class _Step(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("call", ctypes.c_void_p)]


class Recording:
    """Native calls in the order in which they were made. It keeps their arguments alive, at the same addresses."""

    def __init__(self, memory: ResultMemory) -> None:
        """memory: for results."""
        self.memory = memory
        self.calls: list[tuple[Any, ctypes.Structure]] = []
        self._steps: ctypes.Array[_Step] | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the calls made meanwhile in this context."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def replay(self) -> None:
        """Make the same calls again, with what their arguments point to now."""
        if self._steps is None:
            steps = [
                _Step(ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(arguments))
                for function, arguments in self.calls
            ]
            self._steps = (_Step * len(steps))(*steps)
        native = library()
        assert native is not None
        native.replay(self._steps, len(self._steps))


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)
