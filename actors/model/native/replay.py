"""Traces whose native functions run again without Python, as a CUDA graph does on a GPU.

Small steps on a CPU spend much of their time in Python: on views of tensors, on memory for results, and on arguments of
native functions. All of that depends on sizes alone. So the longest run of native functions in a trace is recorded for
usual sizes, and then replayed in C++ with other inputs.
"""

import logging
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile, groupby
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from actors.model.native.calls import Recording, is_native
from actors.model.native.elementwise import add
from actors.model.native.result_memory import ResultMemory

_LEAST_CALLS = 8  # native functions in a run that is worth a recording
_USUAL = 4  # a size is recorded when it comes up so many times
_MOST_SIZES, _MOST_SEEN = 128, 1024  # recorded, and counted
_VIEWS = {  # functions that may return a view. Whether they do is seen when they are recorded
    *(Tensor.view, torch.reshape, torch.transpose, torch.select, torch.unsqueeze, torch.split_with_sizes),
    *(operator.getitem, operator.mul, torch.ops.aten.contiguous.default),
}
_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}
_log = logging.getLogger(__name__)


def replay_native_run(graph: fx.Graph, constants: Mapping[fx.Node, object]) -> None:
    """Replace the longest run of native functions in a trace by one function that records and replays them."""
    runs = (
        list(dropwhile(lambda node: not is_native(node.target), nodes))
        for can, nodes in groupby(graph.nodes, lambda node: node.op == "call_function" and _can_record(node.target))
        if can
    )
    run = max(runs, key=_count_calls, default=[])
    if _count_calls(run) < _LEAST_CALLS:
        return
    inside = set(run)
    read = dict.fromkeys(source for node in run for source in node.all_input_nodes if source not in inside)
    inputs = [node for node in read if node not in constants]
    outputs = [node for node in run if not inside.issuperset(node.users)]
    part = _copy(run, [*(node for node in read if node in constants), *inputs], outputs)
    segment = _Segment(part, [constants[node] for node in read if node in constants])
    with graph.inserting_before(run[0]):
        results = graph.call_function(segment.run, tuple(inputs))
        for index, node in enumerate(outputs):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (results, index)))
    for node in reversed(run):
        graph.erase_node(node)


def _can_record(target: Any) -> bool:
    if isinstance(target, torch._ops.OpOverload) and target.is_view:
        return target.overloadpacket is not torch.ops.aten.to
    return is_native(target) or target in _VIEWS or target is torch.add


def _count_calls(run: Sequence[fx.Node]) -> int:
    return sum(is_native(node.target) for node in run)


def _copy(run: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Return the run as a graph of its own."""
    part = fx.Graph()
    copies = {node: part.placeholder(node.name) for node in inputs}
    for node in run:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[node] for node in outputs))
    return part


class _Segment:
    """A part of a trace that is replayed at usual sizes."""

    def __init__(self, graph: fx.Graph, constants: Sequence[object]) -> None:
        """constants: the first inputs of the graph, which are always the same."""
        self._graph, self._constants = graph, constants
        self._plain = fx.GraphModule({}, graph).forward
        self._memory = ResultMemory()  # of all replays, since only one runs at a time and results are copied
        self._seen: Counter[object] = Counter()
        self._replays: OrderedDict[object, _Replay] = OrderedDict()  # the last used last
        self._can_record = True

    def run(self, *given: Any) -> Sequence[Tensor]:
        """given: the other inputs of the graph."""
        key = torch.get_num_threads(), *[_shape(value) for value in _leaves(given)]
        replay = self._replays.get(key)
        if replay is None and self._can_record and self._is_usual(key):
            replay = self._record(key, given)
        if replay is None:
            results: Sequence[Tensor] = self._plain(*self._constants, *given)
            return results
        self._replays.move_to_end(key)
        return replay.run(given)

    def _is_usual(self, key: object) -> bool:
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] >= _USUAL

    def _record(self, key: object, given: Sequence[Any]) -> "_Replay | None":
        """Return a replay; None if it does something else."""
        try:
            replay = _Replay(self._graph, self._constants, given, self._memory)
        except _UnrecordableError as error:
            _log.info("a model's native functions can't be replayed: %s", error)
            self._can_record = False
            return None
        del self._seen[key]
        self._replays[key] = replay
        if len(self._replays) > _MOST_SIZES:
            self._replays.popitem(last=False)
        return replay


class _Replay:
    """A graph's calls of native functions at one size."""

    def __init__(
        self, graph: fx.Graph, constants: Sequence[object], given: Sequence[Any], memory: ResultMemory
    ) -> None:
        """memory: for results.

        Raises:
            _UnrecordableError: the graph does more than to call native functions.
        """
        inputs = [_copy_input(value) for value in given]
        self._inputs = _tensors(inputs)
        self._recording = Recording(memory)
        memory.drop_all()
        with self._recording.recording(), _OnlyViews():
            self._results = _run(graph, [*constants, *inputs], memory)
        if not all(isinstance(result, Tensor) for result in self._results):
            raise _UnrecordableError("numbers are among the results")
        recorded = [result.clone() for result in self._results]
        if not all(map(torch.equal, self.run(given), recorded)):
            raise _UnrecordableError("calls that depend on others")

    def run(self, given: Sequence[Any]) -> Sequence[Tensor]:
        """Return new tensors."""
        for kept, tensor in zip(self._inputs, _tensors(given), strict=True):
            kept.copy_(tensor)
        self._recording.replay()
        return [result.clone() for result in self._results]


def _run(graph: fx.Graph, given: Sequence[object], memory: ResultMemory) -> Sequence[Tensor]:
    """Run a graph, and use the memory of its results again once they are not needed."""
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
    raise AssertionError("a graph ends with its output")


class _UnrecordableError(Exception):
    """Something other than a native function computes."""


class _OnlyViews(TorchDispatchMode):
    """Refuses all operators of torch but views and memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in _EMPTY and (function._schema.is_mutable or not _are_views(result, args)):
            raise _UnrecordableError(str(function))
        return result


def _are_views(result: Any, args: Sequence[Any]) -> bool:
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(args)}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in _tensors([result]))


def _leaves(values: Iterable[Any]) -> list[Any]:
    """Return the values, those of collections instead of these."""
    leaves: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            leaves += _leaves(value)
        else:
            leaves.append(value)
    return leaves


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [leaf for leaf in _leaves(values) if isinstance(leaf, Tensor)]


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, Tensor) else leaf


def _copy_input(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(*map(_copy_input, value)) if isinstance(value, tuple) else value  # a named tuple
