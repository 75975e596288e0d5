"""Replays a trace's native functions without Python, as CUDA graphs replay kernels on a GPU.

Small steps on a CPU spend much of their time in Python: on views of tensors, on memory for results, and on arguments of
native functions. All of that depends on sizes alone. So a run of native functions in a trace is recorded for usual
sizes, and then replayed in C++ with other inputs.
"""

import ctypes
import logging
import operator
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from engine.kernels.native import Recording, ResultMemory, add, is_native, share_memory
from engine.kernels.operator_trace import Example, UncompiledMode, UntraceableError, trace

_LEAST_CALLS = 6  # native functions in a run that is worth a recording; an EAGLE-3 head has 8
_MOST_SIZES, _MOST_SEEN = 128, 1024  # that are recorded, and counted
# Uses before a size is recorded. A recording takes as long as 3 to 30 replays save: 3 where other processes want cores.
# It doubles whenever another `_MOST_SIZES` recordings were dropped, but only so often.
_USUAL, _MOST_DOUBLINGS = 8, 7
_VIEWS = {  # functions that may return a view, or a size. Whether they do is seen when they are recorded
    *(Tensor.view, torch.reshape, torch.transpose, torch.select, torch.unsqueeze, torch.split_with_sizes),
    *(operator.getitem, operator.mul),
}
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}
_TRACED_TOKENS, _COMPARED_TOKENS = (10, 6), (1, 3)
_COMPUTING = {torch.ops.aten.lift_fresh.default}  # makes a tensor of numbers, and looks like a view
_at_once: ContextVar[bool] = ContextVar("at_once", default=False)
_log = logging.getLogger(__name__)
R = TypeVar("R")


@contextmanager
def record_at_once() -> Iterator[None]:
    """Record sizes the first time that they are used, and not only usual ones. Meant for a warm-up."""
    token = _at_once.set(True)
    try:
        yield
    finally:
        _at_once.reset(token)


def trace_few(call: Callable[..., R], example: Callable[[int], Example]) -> Callable[..., R]:
    """Return a trace of a call over few tokens, whose native functions are replayed.

    Raises:
        UntraceableError: the trace does something else.
    """
    traced = trace(call, *map(example, _TRACED_TOKENS), change=replay_native_run)
    for count in _COMPARED_TOKENS:
        sizes, inputs = example(count)
        if not all(map(torch.equal, _tensors([traced(*sizes, *inputs)]), _tensors([call(*inputs)]))):
            raise UntraceableError(f"it does something else with {count} tokens")
    return traced


def replay_native_run(graph: fx.Graph, constants: Mapping[fx.Node, object]) -> None:
    """Replace the native functions of a trace by one that replays them, if most of them are consecutive.

    constants: the values of the trace's constant inputs.
    """
    _move_up(graph)
    runs = (list(nodes) for can, nodes in groupby(graph.nodes, _is_recordable) if can)
    run = max(runs, key=_count_calls, default=[])
    if _count_calls(run) < max(_LEAST_CALLS, _count_calls(graph.nodes) / 2):
        return
    outputs, views = _read_elsewhere(run)
    nodes = _computed(run)
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    constant, inputs = [node for node in read if node in constants], [node for node in read if node not in constants]
    segment = _Segment(_copy_nodes(nodes, [*constant, *inputs], outputs), [constants[node] for node in constant])
    with graph.inserting_before(run[0]):
        results = graph.call_function(segment.run, tuple(inputs))
        for index, node in enumerate(outputs):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (results, index)))
    for node in reversed(run):
        if node not in views:
            graph.erase_node(node)


def _move_up(graph: fx.Graph) -> None:
    """Move what reads inputs alone, such as rotary angles, before the first native function: so it parts no run."""
    first = next((node for node in graph.nodes if _computes(node)), None)
    written = set[fx.Node]()  # perhaps
    for node in reversed(graph.nodes):
        if _may_write(node) or (node in written and _may_be_view(node)):
            written.update(node.all_input_nodes)
    early = set[fx.Node]()
    is_late = False
    for node in list(graph.nodes):
        is_late |= node is first
        reads_inputs = node.op == "placeholder" or early.issuperset(node.all_input_nodes)
        if _may_write(node) or not reads_inputs or node.op == "output":
            continue
        if is_late and first is not None:
            first.prepend(node)
        if node not in written:
            early.add(node)


def _may_write(node: fx.Node) -> bool:
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return _computes(node) or (is_operator and node.target._schema.is_mutable)  # type: ignore[union-attr]


def _may_be_view(node: fx.Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.is_view:
        return node.target.overloadpacket is not torch.ops.aten.to  # of which traces have only those that copy
    return node.target in _VIEWS


def _is_recordable(node: fx.Node) -> bool:
    return node.op == "call_function" and (_computes(node) or _may_be_view(node))


def _computes(node: fx.Node) -> bool:
    return is_native(node.target) or node.target is torch.add


def _count_calls(nodes: Iterable[fx.Node]) -> int:
    return sum(is_native(node.target) for node in nodes)


def _read_elsewhere(run: Sequence[fx.Node]) -> tuple[list[fx.Node], set[fx.Node]]:
    """Return the results that nodes after a run read, directly or through views, and these views."""
    inside, results, views = set(run), [], set[fx.Node]()
    for node in reversed(run):
        if any(user not in inside or user in views for user in node.users):
            if _computes(node):
                results.append(node)
            else:
                views.add(node)
    return results, views


def _computed(run: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that compute, and those that these read."""
    kept: dict[fx.Node, None] = {}
    for node in reversed(run):
        if _computes(node) or any(user in kept for user in node.users):
            kept[node] = None
    return list(reversed(kept))


def _copy_nodes(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return graph


class _Segment:
    """A part of a trace that is replayed at usual sizes. Only one thread may run it at a time."""

    def __init__(self, graph: fx.Graph, constants: Sequence[object]) -> None:
        """constants: the first inputs of the graph, which are always the same."""
        self._graph, self._constants = graph, constants
        self._plain = fx.GraphModule({}, graph).forward
        self._memory = ResultMemory()  # shared by all replays: only one runs at a time, and results are copied out
        self._seen: Counter[object] = Counter()
        self._replays: OrderedDict[object, _Replay] = OrderedDict()  # least recently used first
        self._dropped = 0  # number of replays
        self._can_record = True

    def run(self, *given: Any) -> Sequence[Any]:
        """Return the graph's results: new tensors. given: its inputs after the constants."""
        leaves = _leaves(given)
        key = torch.get_num_threads(), *map(_key, leaves)
        replay = self._replays.get(key)
        if replay is not None and replay.is_checked:
            self._replays.move_to_end(key)
            return replay.run(leaves)
        replayed = None if replay is None else replay.run(leaves)
        if replay is None and self._can_record and self._count(key) >= self._uses_needed:
            self._record(key, given)
        results: Sequence[Any] = self._plain(*self._constants, *given)  # last, so what it writes to pages stays
        if replay is not None and replayed is not None:
            self._check(replay, replayed, results)
        return results

    @property
    def _uses_needed(self) -> int:
        return 1 if _at_once.get() else _USUAL << min(self._dropped // _MOST_SIZES, _MOST_DOUBLINGS)

    def _count(self, key: object) -> int:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key]

    def _record(self, key: object, given: Sequence[Any]) -> None:
        try:
            replay = _Replay(self._graph, self._constants, given, self._memory)
        except _UnrecordableError as error:
            _log.info("a model's native functions can't be replayed: %s", error)
            self._can_record = False
        except Exception:
            _log.warning("a model's native functions can't be replayed, which costs speed", exc_info=True)
            self._can_record = False
        else:
            del self._seen[key]
            self._replays[key] = replay
            if len(self._replays) > _MOST_SIZES:
                self._replays.popitem(last=False)
                self._dropped += 1

    def _check(self, replay: "_Replay", results: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compare a replay's results with the plain ones, when it is used for the first time."""
        replay.is_checked = all(map(_are_same, _tensors(results), _tensors(expected)))
        if not replay.is_checked:
            _log.warning("replays gave other results than plain calls, so nothing is replayed any more")
            self._can_record = False
            self._replays.clear()


class _Replay:
    """A graph's calls of native functions at one size."""

    def __init__(
        self, graph: fx.Graph, constants: Sequence[object], given: Sequence[Any], memory: ResultMemory
    ) -> None:
        """memory: for results.

        Raises:
            _UnrecordableError: the graph does more than call native functions.
        """
        self.is_checked = False
        with torch.inference_mode(mode=False):  # tensors that may be written in either mode
            inputs = [_map(lambda x: x.clone(memory_format=torch.contiguous_format), value) for value in given]
        self._inputs = _tensors(inputs)
        self._memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in self._inputs]
        self._recording = Recording(memory)
        memory.drop_all()
        with self._recording.record(), _OnlyViews() as mode:
            self._results = _record_graph(graph, [*constants, *inputs], memory)
        self._kept = mode.made  # recorded calls point into it

    def run(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Return new tensors. leaves: of the inputs."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for static, (address, size), tensor in zip(self._inputs, self._memory, tensors, strict=True):
            if tensor.is_contiguous():  # as nearly all are
                ctypes.memmove(address, tensor.data_ptr(), size)
            else:
                static.copy_(tensor)
        self._recording.replay()
        return [_map(Tensor.clone, result) for result in self._results]


def _record_graph(graph: fx.Graph, given: Sequence[object], memory: ResultMemory) -> Sequence[Any]:
    """Run a graph, and use the memory of intermediate results again once they are not needed."""
    nodes, inputs = list(graph.nodes), iter(given)
    last_reader = {source: node for node in nodes for source in node.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    for node in nodes:
        args, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return tuple(args[0])
        if node.op == "placeholder":
            values[node] = next(inputs)
        else:
            function: Any = add if node.target is torch.add and not options else node.target
            values[node] = function(*args, **options)
        for tensor in _tensors([values[node]]):
            memory.hold(tensor)
        for source in {*node.all_input_nodes, node}:
            if last_reader.get(source, node) is node:
                for tensor in _tensors([values.pop(source)]):
                    memory.drop(tensor)
        memory.drop_unheld()
    raise AssertionError("a graph ends with its output")


class _UnrecordableError(Exception):
    """Something other than a native function computes."""


class _OnlyViews(UncompiledMode):
    """Refuses all torch operators but views and allocations, and keeps what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _EMPTY:
            self.made.append(result)
            return result
        is_view = share_memory(_tensors([result]), _tensors(args))
        if function in _COMPUTING or function._schema.is_mutable or not is_view:
            raise _UnrecordableError(str(function))
        return result


def _are_same(left: Tensor, right: Tensor) -> bool:
    if (left.shape, left.stride(), left.dtype) != (right.shape, right.stride(), right.dtype):
        return False
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Return the values, with collections replaced by their contents."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            leaves += _leaves(value)
        else:
            leaves.append(value)
    return leaves


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _key(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        parts = [_map(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
