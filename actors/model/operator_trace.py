"""A model's call without the Python in it: the operators that it comes to, one after the other.

On a CPU the modules, checks and attributes around the operators take a tenth of a small step, and a quarter of a small
model's (docs/experiments.md). So a call is traced at two sizes, which tells what depends on the size, and the line of
operators is run in its place. A call that looks at values, or in which a number is neither constant nor a multiple of a
size, can't be traced. What else a call's Python does by size, by values that no operator reads (`tolist`) or by what it
remembers is frozen: so whoever traces a call has to compare.

Knows nothing of models. The same idea as CUDA graphs, which leave out the launches as well, but for any size.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")


class UntraceableError(Exception):
    """What a call does depends on more than its size."""


class Example(NamedTuple):
    """A call at one size."""

    sizes: Sequence[int]  # that may differ from call to call
    inputs: Sequence[Any]  # tensors, and what else differs from call to call, none of them numbers


def as_one_operator(function: Callable[P, R]) -> Callable[P, R]:
    """A function that traces take as a whole: what it does inside may depend on its arguments in any way.

    These are tensors, inputs of the traced call, or numbers and the like.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        trace = _current.get()
        return function(*args, **kwargs) if trace is None else trace.run(function, args, kwargs)

    return call


def trace(call: Callable[..., Tensor], first: Example, second: Example) -> Callable[..., Tensor]:
    """A function of sizes and inputs, in this order, that does what the call did in both examples.

    Args:
        call: with an example's inputs.
        first, second: no two of whose sizes differ by the same factor.

    Raises:
        UntraceableError: the operators of the two examples are not those of one function.
    """
    traces = [_Trace.of(call, example) for example in (first, second)]
    return _Line(first, second).build(*traces)


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    result: object


class _Trace(TorchDispatchMode):
    """The operators of one call. Keeps all that went in and came out, so that no two have the same identity."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.result: Tensor | None = None
        self._within_one = False

    @classmethod
    def of(cls, call: Callable[..., Tensor], example: Example) -> "_Trace":
        made = cls()
        token = _current.set(made)
        try:
            with made:
                made.result = call(*example.inputs)
        finally:
            _current.reset(token)
        return made

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._within_one:
            return function(*args, **(kwargs or {}))
        if function is torch.ops.aten.lift_fresh.default:  # a tensor of numbers in the code: made anew at each call
            function = torch.ops.aten.clone.default
        if _looks_at_values(function, args):
            raise UntraceableError(f"it calls {function}")
        return self._note(function, args, kwargs or {}, function(*args, **(kwargs or {})))

    def run(self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object]) -> R:
        """Call what counts as one operator."""
        if self._within_one:
            return function(*args, **kwargs)
        self._within_one = True
        try:
            return self._note(function, args, kwargs, function(*args, **kwargs))
        finally:
            self._within_one = False

    def _note(self, function: Callable[..., R], args: Sequence[object], kwargs: Mapping[str, object], result: R) -> R:
        self.calls.append(_Call(function, args, kwargs, result))
        return result


_current: ContextVar[_Trace | None] = ContextVar("trace", default=None)


def _looks_at_values(function: Any, args: Sequence[Any]) -> bool:
    """Whether an operator's result, or its shape, is for the host to see before it can go on."""
    if function is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if function is torch.ops.aten.is_nonzero.default:  # which has no tag that says so
        return True
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags))


class _Line:
    """Two traces, as one function."""

    def __init__(self, first: Example, second: Example) -> None:
        self._graph = fx.Graph()
        self._constants: list[object] = []
        self._sizes = [
            (self._graph.placeholder(f"size_{at}"), *pair)
            for at, pair in enumerate(zip(first.sizes, second.sizes, strict=True))
        ]
        self._nodes: tuple[dict[int, fx.Node], dict[int, fx.Node]] = ({}, {})  # of what each trace has seen, by id
        for at, pair in enumerate(zip(first.inputs, second.inputs, strict=True)):
            self._is(*pair, self._graph.placeholder(f"input_{at}"))

    def build(self, first: _Trace, second: _Trace) -> Callable[..., Tensor]:
        if len(first.calls) != len(second.calls):
            raise UntraceableError("it calls more operators for more tokens")
        for one, two in zip(first.calls, second.calls, strict=True):
            if one.function is not two.function or one.kwargs.keys() != two.kwargs.keys():
                raise UntraceableError(f"it calls {one.function} or {two.function}")
            args = self._argument(tuple(one.args), tuple(two.args))
            kwargs = {name: self._argument(one.kwargs[name], two.kwargs[name]) for name in one.kwargs}
            self._know(one.result, two.result, self._graph.call_function(one.function, args, kwargs))
        self._graph.output(self._argument(first.result, second.result))
        self._graph.lint()
        run, constants = fx.GraphModule({}, self._graph).forward, self._constants
        return lambda *given: run(*constants, *given)

    def _know(self, one: object, two: object, node: fx.Node) -> None:
        """A node's value is what the traces have for one result, a tensor or several."""
        if isinstance(one, Tensor):
            self._is(one, two, node)
        elif isinstance(one, list | tuple) and isinstance(two, list | tuple):
            if len(one) != len(two):
                raise UntraceableError("an operator has more results for more tokens")
            for at, parts in enumerate(zip(one, two, strict=True)):
                self._know(*parts, self._graph.call_function(operator.getitem, (node, at)))

    def _is(self, one: object, two: object, node: fx.Node) -> None:
        self._nodes[0][id(one)] = self._nodes[1][id(two)] = node

    def _argument(self, one: Any, two: Any) -> Any:
        """What stands in the place of a value that the traces have."""
        node = self._nodes[0].get(id(one))
        if type(one) is not type(two) or node is not self._nodes[1].get(id(two)):
            raise UntraceableError("its operators follow from each other in several ways")
        if node is not None:
            return node
        if isinstance(one, Tensor):
            return self._constant(one, two)
        if type(one) in (list, tuple):
            if len(one) != len(two):
                raise UntraceableError("it brings together more for more tokens")
            return type(one)(self._argument(*pair) for pair in zip(one, two, strict=True))
        if one == two:
            return one
        return self._size(one, two)

    def _constant(self, one: Tensor, two: Tensor) -> fx.Node:
        if one is not two and not (one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)):
            raise UntraceableError("it makes tensors from numbers")
        with self._graph.inserting_before(self._sizes[0][0]):
            node = self._graph.placeholder(f"constant_{len(self._constants)}")
        self._constants.append(one)
        self._is(one, two, node)
        return node

    def _size(self, one: object, two: object) -> fx.Node:
        for node, size, other in self._sizes:
            if isinstance(one, int) and isinstance(two, int) and one % size == 0 and one * other == two * size:
                return self._graph.call_function(operator.mul, (node, one // size)) if one != size else node
        raise UntraceableError(f"{one} becomes {two} with more tokens")
