"""Replays of native functions have the bits of the calls that they replace, whatever ran before them."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.functional import gelu

from engine.kernels import native as elementwise
from engine.kernels import native_replay as replay
from engine.kernels.native import Recording, ResultMemory, call, empty, library, native_operator
from engine.kernels.operator_trace import Example, trace
from engine.layers.faster_layers import round_inputs, use_faster_layers
from engine.layers.linear import NativeLinear
from engine.layers.mlp import silu_gate
from engine.layers.onednn_linear import PackedLinear
from engine.layers.quantized_linear import round_linears
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")


def random_layers() -> list[NativeLinear]:
    generator = torch.Generator().manual_seed(0)
    return [NativeLinear(torch.randn(512, 512, generator=generator) / 512**0.5, None) for _ in range(8)]


DTYPES = [torch.float32, torch.bfloat16]
LAYERS = random_layers() if library() is not None else []
TEXT = [(7 * i) % 50 + 3 for i in range(60)]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets an item for each replay. Sizes are usual after four uses."""
    monkeypatch.setattr(replay, "_USUAL", 4)
    replays: list[object] = []
    run = replay._Replay.run

    def note(self: replay._Replay, given: Sequence[object]) -> Sequence[Tensor]:
        replays.append(given)
        return run(self, given)

    monkeypatch.setattr(replay._Replay, "run", note)
    return replays


def make_runner(
    family: str, dtype: torch.dtype, *, traces: bool, bits: int | None = None, rounds: bool = False
) -> Runner:
    """bits: that linear layers are rounded to. rounds: their inputs, too."""
    model = tiny_model(family)
    model.to(dtype)  # type: ignore[arg-type]
    if bits is not None:
        round_linears(model, bits)
    if rounds:
        assert round_inputs(model)
    use_faster_layers(model)
    runner = Runner(model, slots=6, max_length=80, max_query=24)
    runner.keep_hidden_states([1])
    runner.logits([RowInput(0, 0, [0])])
    runner.cache.clear_all()
    if traces:
        runner.use_trace()
    return runner


def steps(seed: int, count: int) -> list[list[RowInput]]:
    """Return batches of usual sizes: rows at different places, some with trees."""
    chance = random.Random(seed)
    ends, batches = [0] * 6, []
    for _ in range(count):
        rows = []
        for slot in sorted(chance.sample(range(6), chance.choice([1, 1, 3]))):
            start, tokens = ends[slot], chance.choice([1, 4])
            if start + 4 > 70:
                start = 0
            paths = [[start], [start, start + 1], [start, start + 2], [start + 3]] if tokens == 4 and start else None
            rows.append(RowInput(slot, start, TEXT[start : start + 1] * tokens, trunk=start, paths=paths))
            ends[slot] = start + 1 if paths else start + tokens
        batches.append(rows)
    return batches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "mistral-window", "gemma2", "qwen3-moe", "gpt2"])
def test_replayed_steps_have_the_bits_of_others(family: str, dtype: torch.dtype, replayed: list[object]) -> None:
    plain, traced = (make_runner(family, dtype, traces=traces) for traces in (False, True))
    kept: list[tuple[Tensor, Tensor]] = []
    for rows in steps(1, 90):
        logits, expected = traced.logits(rows), plain.logits(rows)
        assert traced.hidden is not None
        assert plain.hidden is not None
        for result, other in zip((logits, *traced.hidden), (expected, *plain.hidden), strict=True):
            assert torch.equal(result, other)
        kept.append((logits, expected))
    assert all(torch.equal(logits, expected) for logits, expected in kept)  # later replays did not write to them
    native = not any(isinstance(layer, PackedLinear | nn.Linear) for layer in plain.model.modules())
    assert bool(replayed) == (native and family in ("llama-gqa", "qwen3", "mistral-window"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "rounds"), [(4, False), (8, False), (4, True), (8, True)])
def test_weights_of_few_bits_are_replayed(bits: int, rounds: bool, dtype: torch.dtype, replayed: list[object]) -> None:
    options: dict[str, Any] = {"bits": bits, "rounds": rounds}
    plain, traced = (make_runner("llama-gqa", dtype, traces=traces, **options) for traces in (False, True))
    for rows in steps(2, 40):
        assert torch.equal(traced.logits(rows), plain.logits(rows))
    assert replayed


def layers(x: Tensor) -> Tensor:
    """Return eight layers' result, [N, 512]."""
    for layer in LAYERS:
        x = layer(x)
    return x


def call_often(function: Callable[[Tensor], Tensor], rows: Sequence[int]) -> None:
    """Compare a function with its trace. rows: of its input in each call, [rows, 512]."""
    first, second = (Example([count], [torch.ones(count, 512)]) for count in (3, 5))
    traced = trace(function, first, second, change=replay.replay_native_run)
    inputs = [torch.randn(count, 512, generator=torch.Generator().manual_seed(i)) * 2 for i, count in enumerate(rows)]
    results = [traced(len(x), x) for x in inputs]
    assert all(torch.equal(result, function(x)) for result, x in zip(results, inputs, strict=True))


def test_a_size_is_recorded_when_it_is_usual(replayed: list[object]) -> None:
    call_often(layers, [1, 2, 3] * (replay._USUAL - 1))
    assert not replayed
    call_often(layers, [1, 2, 3] * replay._USUAL)
    assert not replayed
    call_often(layers, [1, 2, 3] * (replay._USUAL + 2))
    assert len(replayed) == 3 * 2  # the first is compared


def test_a_warm_up_records_at_once(replayed: list[object]) -> None:
    with replay.record_at_once():
        call_often(layers, [1, 2, 1, 2, 1])
    assert len(replayed) == 3


def test_sizes_that_are_no_longer_used_are_forgotten(replayed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_SIZES", 2)
    monkeypatch.setattr(replay, "_MOST_SEEN", 4)
    call_often(layers, [1] * 6 + [2] * 6 + [3] * 6 + [1] * 6 + [1, 2, 3, 4, 5, 6] * 5)
    assert replayed


def test_the_number_of_threads_belongs_to_a_size(replayed: list[object]) -> None:
    traced = trace(layers, *(Example([n], [torch.ones(n, 512)]) for n in (3, 5)), change=replay.replay_native_run)
    threads, x = torch.get_num_threads(), torch.ones(2, 512)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            replayed.clear()
            for _ in range(replay._USUAL):
                traced(2, x)
            assert not replayed
            assert torch.equal(traced(2, x), layers(x))
            assert replayed
    finally:
        torch.set_num_threads(threads)


def twice_in_place(x: Tensor) -> Tensor:
    """Double a tensor through a view of it."""
    x.view(-1).mul_(2)
    return x + 0.5


@pytest.mark.parametrize(
    "function",
    [
        lambda x: layers(x + x),
        lambda x: layers((x + x.flip(0)) * 2),
        lambda x: layers(torch.cat([x, x], 1)[:, 7:519]),  # copied line by line
        lambda x: layers(x.view(-1, 2, 256).transpose(0, 1).reshape(-1, 512)) * 2,
        lambda x: layers(x.transpose(0, 1).reshape(x.shape)),
        lambda x: gelu(layers(x).split([387, 125], 1)[1]),  # it rounds differently with other strides
        lambda x: twice_in_place(layers(x)),
        lambda x: layers(x).view(512 * len(x)).expand(3, 512 * len(x)),
    ],
)
def test_what_runs_around_a_replay_has_the_same_bits(
    function: Callable[[Tensor], Tensor], replayed: list[object]
) -> None:
    call_often(function, [2, 1, 4] * 6)
    assert replayed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x + x[:1],
        lambda x: torch.add(x, x, alpha=-2),
    ],
)
def test_a_run_in_which_torch_computes_is_not_replayed(
    function: Callable[[Tensor], Tensor], replayed: list[object]
) -> None:
    def mixed(x: Tensor) -> Tensor:
        return layers(function(silu_gate(torch.cat([x, x], 1))))

    call_often(mixed, [2, 1, 4] * 6)
    assert not replayed


def turned(x: Tensor, angles: Tensor) -> Tensor:
    return layers(layers(x) + angles.cos())


def turned_twice(x: Tensor, angles: Tensor) -> Tensor:
    first = turned(x, angles)
    angles.view(-1).mul_(2)
    return layers(first + angles.cos())


@pytest.mark.parametrize(("function", "outside"), [(turned, 0), (turned_twice, 24)])
def test_what_reads_inputs_alone_parts_no_run(function: Callable[..., Tensor], outside: int) -> None:
    """Unless something writes to them."""
    left: list[int] = []

    def change(graph: fx.Graph, constants: Mapping[fx.Node, object]) -> None:
        replay.replay_native_run(graph, constants)
        left.append(replay._count_calls(graph.nodes))

    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    traced = trace(function, *(Example([n], [x[:n].clone(), x[:n].clone()]) for n in (3, 5)), change=change)
    assert left == [outside]
    assert torch.equal(traced(2, x[:2].clone(), x[:2].clone()), function(x[:2].clone(), x[:2].clone()))


def half(x: Tensor) -> Tensor:
    return x * 0.5


def copy_in_place(x: Tensor) -> Tensor:
    output = empty(*x.shape, dtype=x.dtype)
    output.copy_(x)
    return output


def look_at_a_value(x: Tensor) -> Tensor:
    return silu_gate(-x) if x[0, 0].item() > 0 else silu_gate(x)


@pytest.mark.parametrize("operator", [half, copy_in_place, look_at_a_value])
def test_an_operator_that_does_not_compute_natively_is_not_replayed(
    operator: Callable[[Tensor], Tensor], replayed: list[object]
) -> None:
    native = native_operator(operator)
    call_often(lambda x: native(layers(x)), [2, 1] * 6)
    assert not replayed


def test_a_recording_with_other_results_is_not_used(replayed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "replay", lambda self: None)
    call_often(layers, [2, 4] * 8)
    assert len(replayed) == 1


def test_a_wrong_replay_leaves_what_plain_calls_write(replayed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    written, number = torch.zeros(2, 512), torch.ones(2, 512)

    @native_operator
    def write(x: Tensor, to: Tensor) -> Tensor:
        call("add_float32", elementwise._AddCall(x.data_ptr(), number.data_ptr(), x.numel(), 1, to.data_ptr()))
        return elementwise.add(x, x)

    monkeypatch.setattr(Recording, "replay", lambda self: written.fill_(7.0))
    traced = trace(
        lambda x: write(layers(x), written),
        *(Example([n], [torch.ones(n, 512)]) for n in (1, 2)),
        change=replay.replay_native_run,
    )
    for value in range(8):
        x = torch.full((2, 512), float(value))
        traced(2, x)
        assert torch.equal(written, layers(x) + 1)
    assert len(replayed) == 1


def test_memory_that_an_operator_makes_by_itself_is_kept(replayed: list[object]) -> None:
    def own_memory(x: Tensor) -> Tensor:
        output = torch.empty(len(x), x.shape[1])
        call("add_float32", elementwise._AddCall(x.data_ptr(), x.data_ptr(), x.numel(), 1, output.data_ptr()))
        return output

    native = native_operator(own_memory)
    call_often(lambda x: native(layers(x)), [2, 1] * 8)
    assert replayed


def test_a_failed_recording_costs_only_speed(replayed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResultMemory, "empty", lambda *given: 1 // 0)
    call_often(layers, [1] * 8)
    assert not replayed


def test_replays_run_in_inference_mode_and_outside(replayed: list[object]) -> None:
    traced = trace(layers, *(Example([n], [torch.ones(n, 512)]) for n in (3, 5)), change=replay.replay_native_run)
    for number in range(12):
        with torch.inference_mode(mode=number % 3 > 0):
            x = torch.full((2, 512), number / 3)
            assert torch.equal(traced(2, x), layers(x))
    assert replayed


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_copies_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(2)).to(dtype) * 100
    recording = Recording(ResultMemory())
    for view in (x, x[0], x[:, 1], x.transpose(1, 2), x.permute(2, 0, 1, 3), x[..., 1:5], x[:1, :, 1:2, :1]):
        other = view.flip(0).contiguous() / 3
        with recording.record():
            copied = elementwise.contiguous(view)
            summed = elementwise.add(copied, other)
        assert copied.is_contiguous()
        assert torch.equal(copied, view)
        assert torch.equal(summed, view + other)


def test_memory_is_used_again_when_nothing_holds_it() -> None:
    memory = ResultMemory()
    first = memory.empty([3, 5], torch.float32)
    memory.hold(first)
    memory.hold(first.view(5, 3)[1:])
    memory.drop(first)
    memory.drop_unheld()
    second = memory.empty([15], torch.float32)
    assert second.data_ptr() != first.data_ptr()
    memory.hold(second)
    memory.drop(first[1:])
    memory.drop(torch.ones(3))  # of others
    memory.drop_unheld()
    assert memory.empty([2, 16], torch.bfloat16).data_ptr() == first.data_ptr()
    memory.drop_all()
    assert {memory.empty([15], torch.float32).data_ptr() for _ in range(2)} == {first.data_ptr(), second.data_ptr()}
