"""Records a call on a CPU at fixed addresses, as CUDA graphs record kernels on a GPU.

A replay makes the native calls one after another in C++. Between them it calls those of torch's operators that have no
native function.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels.native import KINDS, Recording, ResultMemory, add, call, empty, share_memory, structure
from engine.kernels.operator_trace import UncompiledMode, looks_at_values

_aten = torch.ops.aten
_MoveCall = structure("*from *from_rows *to *to_rows rows bytes")
_CountCall = structure("*left *right constant size *output")
_WidenCall = structure("*from size *to")
_MOST_BYTES = 2**26  # of torch's results in all recordings; later calls are not recorded
_log = logging.getLogger(__name__)


class CallRecorder:
    """What `GraphRecorder` is on a GPU. A result is valid until the next replay of any of its calls."""

    def __init__(self) -> None:
        self._memory = ResultMemory()  # of native results, shared by all calls: only one runs at a time
        self._other_bytes = 0  # of torch's results, which all calls keep
        self.error: Exception | None = None  # why a call could not be recorded; then no other is

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Make a call, and return its replay; if it can't be recorded, the call itself.

        It is recorded again for each number of threads.
        """
        recorded: dict[int, _Recorded] = {}

        def replay() -> Tensor:
            threads = torch.get_num_threads()
            if threads in recorded:
                recorded[threads].recording.replay()
                return recorded[threads].output
            if self.error is None and self._other_bytes <= _MOST_BYTES:
                try:
                    recorded[threads] = self._record(run)
                    return recorded[threads].output
                except _UnrecordableError as error:
                    _log.info("a call can't be recorded: %s", error)
                    self.error = error
                except Exception as error:
                    _log.warning("a call can't be recorded, which costs speed", exc_info=True)
                    self.error = error
            return run()

        replay()
        return replay

    def _record(self, run: Callable[[], Tensor]) -> "_Recorded":
        recording = Recording(self._memory)
        self._memory.drop_all()
        with recording.record(), _Operators(recording) as operators:
            result = _Recorded(recording, run(), operators.made)
        self._other_bytes += operators.bytes
        return result

    @staticmethod
    def sizes(most: int) -> list[int]:
        """Return the numbers of rows or tokens to record. Few are padded, since padding takes time."""
        return [*range(1, min(most, 16) + 1), *range(24, most + 1, 8)]


class _Recorded(NamedTuple):
    recording: Recording
    output: Tensor
    made: Sequence[object]  # all that torch's operators returned, because calls point into it


class _UnrecordableError(RuntimeError):
    """An operator whose result the host must see."""


class _Operators(UncompiledMode):
    """Records torch's operators between native calls, and keeps all that they return."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.made: list[object] = []
        self.bytes = 0  # of results that are no views
        self._recording = recording

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if looks_at_values(function, args):
            raise _UnrecordableError(str(function))
        native = _NATIVE.get(function)
        result = None if native is None or kwargs else native(*args)
        if result is None:
            result = function(*args, **kwargs)
            self._record(function, args, kwargs, result)
        self.made.append(result)
        return result

    def _record(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        tensors = [result] if isinstance(result, Tensor) else list(result) if isinstance(result, list | tuple) else []
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise _UnrecordableError(str(function))
        if function._schema.is_mutable:
            self._recording.then(partial(function, *args, **kwargs))
            return
        given = [each for each in args if isinstance(each, Tensor)]
        if function not in _ALLOCATIONS and not share_memory(tensors, given):
            self.bytes += sum(tensor.nbytes for tensor in tensors)
            self._recording.then(partial(_compute, function, args, kwargs, tensors))


def _compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]) -> None:
    """Compute the results again, where they are."""
    new = function(*args, **kwargs)
    for result, tensor in zip(results, [new] if isinstance(new, Tensor) else new, strict=True):
        result.copy_(tensor)


# The native forms of torch's operators. Each returns None where it does not fit.


def _add(left: Tensor, right: Any) -> Tensor | None:
    if left.dtype == torch.int64:
        return _count(left, right, 1, torch.empty_like(left))
    alike = isinstance(right, Tensor) and left.shape == right.shape and left.dtype == right.dtype
    return add(left, right) if alike and left.dtype in KINDS and _are_contiguous(left, right) else None


def _count(left: Tensor, right: Any, sign: int, output: Tensor) -> Tensor | None:
    integers = left.dtype == torch.int64 and _are_contiguous(left)
    if integers and isinstance(right, int):
        call("count", _CountCall(left.data_ptr(), None, sign * right, left.numel(), output.data_ptr()))
    elif integers and sign == 1 and isinstance(right, Tensor) and _are_alike(left, right):
        call("count", _CountCall(left.data_ptr(), right.data_ptr(), 0, left.numel(), output.data_ptr()))
    else:
        return None
    return output


def _to(x: Tensor, dtype: torch.dtype, *_: bool) -> Tensor | None:
    if (x.dtype, dtype) != (torch.bfloat16, torch.float32) or not _are_contiguous(x):
        return None
    output = empty(*x.shape, dtype=dtype)
    call("widen", _WidenCall(x.data_ptr(), x.numel(), output.data_ptr()))
    return output


def _copy(to: Tensor, source: Tensor, *_: bool) -> Tensor | None:
    return _move(source, None, to, None, 1) if _are_alike(to, source) else None


def _select(x: Tensor, dim: int, rows: Tensor) -> Tensor | None:
    if dim != 0 or rows.dim() != 1 or rows.dtype != torch.int64 or not _are_contiguous(x, rows):
        return None
    return _move(x, rows, empty(len(rows), *x.shape[1:], dtype=x.dtype), None, len(rows))


def _embed(weight: Tensor, ids: Tensor, *_: object) -> Tensor | None:
    rows = _select(weight, 0, ids.reshape(-1)) if _are_contiguous(ids) else None
    return None if rows is None else rows.view(*ids.shape, -1)


def _put(x: Tensor, dim: int, rows: Tensor, source: Tensor) -> Tensor | None:
    if dim != 0 or not _are_contiguous(x, rows, source) or rows.dtype != torch.int64 or x.dtype != source.dtype:
        return None
    return _move(source, None, x, rows, len(rows))


def _move(source: Tensor, from_rows: Tensor | None, to: Tensor, to_rows: Tensor | None, rows: int) -> Tensor:
    size = (source if from_rows is None else to).nbytes // rows if rows else 0
    indices = [None if each is None else each.data_ptr() for each in (from_rows, to_rows)]
    call("move_rows", _MoveCall(source.data_ptr(), indices[0], to.data_ptr(), indices[1], rows, size))
    return to


def _are_contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _are_alike(left: Tensor, right: Tensor) -> bool:
    return (left.shape, left.dtype) == (right.shape, right.dtype) and _are_contiguous(left, right)


_ALLOCATIONS = {_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default}
_NATIVE: Mapping[object, Callable[..., Tensor | None]] = {
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: lambda left, right: _count(left, right, 1, left),
    _aten.sub.Tensor: lambda left, right: _count(left, right, -1, torch.empty_like(left)),
    _aten.to.dtype: _to,
    _aten.copy_.default: _copy,
    _aten.index_select.default: _select,
    _aten.embedding.default: _embed,
    _aten.index_copy_.default: _put,
}
