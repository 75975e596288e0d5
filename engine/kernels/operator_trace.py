"""A model's call as a plain sequence of operators, without the Python around them; for any number of tokens.

On a CPU the modules, checks and attributes around the operators take a tenth of a small step, and a quarter of a small
model's (docs/experiments.md). So a call is traced at two sizes, to see which numbers depend on the size, and then the
sequence is run in its place.

A call can't be traced if it looks at values, or if a number is neither constant nor a multiple of a size. Other
decisions of its Python are frozen: by size, by values that no operator reads (`tolist`), or by state. So the caller
must compare results.
"""

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")

MAX_TRACED_TOKENS = 128  # of a call that is worth tracing; with more, the cost of Python is negligible
_log = logging.getLogger(__name__)
_aten = torch.ops.aten
# Functions that do the same as an operator, and take half the time to call, since torch need not look at its schema.
_QUICKER: Mapping[object, Callable[..., Any]] = {
    _aten.add.Tensor: torch.add,
    _aten.mul.Tensor: torch.mul,
    _aten.view.default: Tensor.view,
    _aten.reshape.default: torch.reshape,
    _aten.transpose.int: torch.transpose,
    _aten.select.int: torch.select,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.split_with_sizes.default: torch.split_with_sizes,
}


class UntraceableError(Exception):
    """What a call does depends on more than its size."""


class Example(NamedTuple):
    """A call at one size."""

    sizes: Sequence[int]  # numbers that may differ between calls
    inputs: Sequence[Any]  # tensors and other values that may differ between calls; no numbers


Change = Callable[[fx.Graph, Mapping[fx.Node, object]], None]  # takes a graph and its constants


def as_one_operator(function: Callable[P, R]) -> Callable[P, R]:
    """Let traces take a function as a single operator, so that it may look at values.

    Its arguments are tensors, inputs of the traced call, or constants.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        trace = _current.get()
        return function(*args, **kwargs) if trace is None else trace.run(function, args, kwargs)

    return call


def trace(
    call: Callable[..., R], first: Example, second: Example, *, change: Change = lambda graph, constants: None
) -> Callable[..., R]:
    """Return a function of sizes and inputs, in this order, that does what the call did in both examples.

    Args:
        call: takes an example's inputs. Returns a tensor or a tuple of tensors.
        first, second: no two of their sizes differ by the same factor.
        change: may edit the graph before it is compiled. It also gets the values of the graph's constant inputs.

    Raises:
        UntraceableError: the operators of the two examples are not those of one function.
    """
    traces = _Trace.record(call, first), _Trace.record(call, second)
    return _Merger(first, second).build(*traces, change)


@contextmanager
def log_failed_trace(name: str) -> Iterator[None]:
    """Log why the block can't trace a call, or why the trace does something else, instead of raising.

    name: what is traced.
    """
    try:
        yield
    except UntraceableError as error:
        _log.info("%s runs with its own Python: %s", name, error)
    except Exception:
        _log.warning("%s can't be traced, which costs speed", name, exc_info=True)


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    result: object


class UncompiledMode(TorchDispatchMode):
    """Sees torch's operators in code that nobody compiles. Else torch would load its compiler: 130 MB."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Trace(UncompiledMode):
    """The operators of one call. It keeps all arguments and results, so that each has an identity of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.result: object = None
        self._within_operator = False

    @classmethod
    def record(cls, call: Callable[..., object], example: Example) -> "_Trace":
        trace = cls()
        token = _current.set(trace)
        try:
            with trace:
                trace.result = call(*example.inputs)
        finally:
            _current.reset(token)
        return trace

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._within_operator:
            return function(*args, **(kwargs or {}))
        if (
            function is torch.ops.aten.lift_fresh.default
        ):  # a tensor made from numbers in the code: made again at each call
            function = torch.ops.aten.clone.default
        if looks_at_values(function, args):
            raise UntraceableError(f"it calls {function}")
        result = function(*args, **(kwargs or {}))
        if result is args[0] and not function._schema.is_mutable:  # `to` with the dtype that a tensor has
            return result
        return self._note(function, args, kwargs or {}, result)

    def run(self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]) -> R:
        """Call a function that counts as one operator."""
        if self._within_operator:
            return function(*args, **kwargs)
        self._within_operator = True
        try:
            return self._note(function, args, kwargs, function(*args, **kwargs))
        finally:
            self._within_operator = False

    def _note(self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object], result: R) -> R:
        self.calls.append(_Call(function, args, kwargs, result))
        return result


_current: ContextVar[_Trace | None] = ContextVar("trace", default=None)


def looks_at_values(function: Any, args: Sequence[Any]) -> bool:
    """Whether the host must see an operator's result, or its shape, before it can go on."""
    if function is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if function is torch.ops.aten.is_nonzero.default:  # it lacks the tag
        return True
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags))


class _Merger:
    """Makes one function of two traces."""

    def __init__(self, first: Example, second: Example) -> None:
        self._graph = fx.Graph()
        self._constants: dict[fx.Node, object] = {}
        self._sizes = [
            (self._graph.placeholder(f"size_{index}"), *pair)
            for index, pair in enumerate(zip(first.sizes, second.sizes, strict=True))
        ]
        self._nodes: tuple[dict[int, fx.Node], dict[int, fx.Node]] = ({}, {})  # by the id of each trace's value
        for index, pair in enumerate(zip(first.inputs, second.inputs, strict=True)):
            self._bind(*pair, self._graph.placeholder(f"input_{index}"))

    def build(self, first: _Trace, second: _Trace, change: Change) -> Callable[..., Any]:
        if len(first.calls) != len(second.calls):
            raise UntraceableError("it calls more operators for more tokens")
        for left, right in zip(first.calls, second.calls, strict=True):
            if left.function is not right.function or left.kwargs.keys() != right.kwargs.keys():
                raise UntraceableError(f"it calls {left.function} or {right.function}")
            args = self._argument(tuple(left.args), tuple(right.args))
            kwargs = {name: self._argument(left.kwargs[name], right.kwargs[name]) for name in left.kwargs}
            function = _QUICKER.get(left.function, left.function)
            self._bind_result(left.result, right.result, self._graph.call_function(function, args, kwargs))
        self._graph.output(self._argument(first.result, second.result))
        change(self._graph, self._constants)
        for node in [node for node in self._constants if not node.users]:  # each takes time at every call
            self._graph.erase_node(node)
            del self._constants[node]
        self._graph.lint()
        run, constants = fx.GraphModule({}, self._graph).forward, list(self._constants.values())
        return lambda *given: run(*constants, *given)

    def _bind_result(self, left: object, right: object, node: fx.Node) -> None:
        """Let a node stand for an operator's result in both traces: a tensor or several."""
        if isinstance(left, Tensor):
            self._bind(left, right, node)
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) != len(right):
                raise UntraceableError("an operator has more results for more tokens")
            for index, parts in enumerate(zip(left, right, strict=True)):
                self._bind_result(*parts, self._graph.call_function(operator.getitem, (node, index)))

    def _bind(self, left: object, right: object, node: fx.Node) -> None:
        self._nodes[0][id(left)] = self._nodes[1][id(right)] = node

    def _argument(self, left: Any, right: Any) -> Any:
        """Return what stands for a pair of values: a node, a constant, or a collection of these."""
        node = self._nodes[0].get(id(left))
        if type(left) is not type(right) or node is not self._nodes[1].get(id(right)):
            raise UntraceableError("its operators follow from each other in several ways")
        if node is not None:
            return node
        if isinstance(left, Tensor):
            return self._constant(left, right)
        if type(left) in (list, tuple):
            if len(left) != len(right):
                raise UntraceableError("it brings together more for more tokens")
            return type(left)(self._argument(*pair) for pair in zip(left, right, strict=True))
        if left == right:
            return left
        return self._size(left, right)

    def _constant(self, left: Tensor, right: Tensor) -> fx.Node:
        if left is not right and not (
            left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
        ):
            raise UntraceableError("it makes tensors from numbers")
        with self._graph.inserting_before(self._sizes[0][0]):
            node = self._graph.placeholder(f"constant_{len(self._constants)}")
        self._constants[node] = left
        self._bind(left, right, node)
        return node

    def _size(self, left: object, right: object) -> fx.Node:
        for node, size, other in self._sizes:
            if isinstance(left, int) and isinstance(right, int) and left % size == 0 and left * other == right * size:
                return self._graph.call_function(operator.mul, (node, left // size)) if left != size else node
        raise UntraceableError(f"{left} becomes {right} with more tokens")
