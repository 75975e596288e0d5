"""Replays of native functions have the bits of the calls that they replace, whatever ran before them."""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from actors.model.faster_layers import use_faster_layers
from actors.model.forward_input import RowInput
from actors.model.native import elementwise, replay
from actors.model.native.calls import Recording, empty, native_operator
from actors.model.native.gated_mlp import silu_gate
from actors.model.native.library import library
from actors.model.native.linear import NativeLinear
from actors.model.native.result_memory import ResultMemory
from actors.model.operator_trace import Example, trace
from actors.model.runner import Runner
from tests.support.models import tiny_model

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
TEXT = [(7 * i) % 50 + 3 for i in range(60)]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gets an item for each replay."""
    replays: list[object] = []
    run = replay._Replay.run

    def note(self: replay._Replay, given: Sequence[object]) -> Sequence[Tensor]:
        replays.append(given)
        return run(self, given)

    monkeypatch.setattr(replay._Replay, "run", note)
    return replays


def make_runner(family: str, dtype: torch.dtype, *, traces: bool) -> Runner:
    model = tiny_model(family)
    model.to(dtype)  # type: ignore[arg-type]
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
    native = all(isinstance(layer, NativeLinear) for layer in plain.model.modules() if "Linear" in type(layer).__name__)
    if family in ("llama-gqa", "mistral-window") and dtype == torch.float32 and native:
        assert replayed


def gates(x: Tensor) -> Tensor:
    """Halve the features eight times."""
    for _ in range(8):
        x = silu_gate(x)
    return x


def call_often(function: Callable[[Tensor], Tensor], rows: Sequence[int]) -> None:
    """Compare a function with its trace. rows: of its input in each call, [rows, 512]."""
    first, second = (Example([count], [torch.ones(count, 512)]) for count in (3, 5))
    traced = trace(function, first, second, change=replay.replay_native_run)
    inputs = [torch.randn(count, 512, generator=torch.Generator().manual_seed(i)) * 2 for i, count in enumerate(rows)]
    results = [traced(len(x), x) for x in inputs]
    assert all(torch.equal(result, function(x)) for result, x in zip(results, inputs, strict=True))


def test_a_size_is_recorded_when_it_is_usual(replayed: list[object]) -> None:
    call_often(gates, [1, 2, 3] * (replay._USUAL - 1))
    assert not replayed
    call_often(gates, [1, 2, 3] * replay._USUAL)
    assert len(replayed) == 3 * 2  # once to compare


def test_sizes_that_are_no_longer_used_are_forgotten(replayed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_SIZES", 2)
    monkeypatch.setattr(replay, "_MOST_SEEN", 4)
    call_often(gates, [1] * 6 + [2] * 6 + [3] * 6 + [1] * 6 + [1, 2, 3, 4, 5, 6] * 5)
    assert replayed


def test_the_number_of_threads_belongs_to_a_size(replayed: list[object]) -> None:
    threads = torch.get_num_threads()
    try:
        for count in (threads, 1, 3):
            torch.set_num_threads(count)
            call_often(gates, [200] * 6)
    finally:
        torch.set_num_threads(threads)
    assert replayed


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: gates(x + x),
        lambda x: gates((x + x.flip(0)) * 2),
        lambda x: gates(torch.cat([x, x], 1)[:, 7:519]),  # a copy of lines
        lambda x: gates(x.view(-1, 2, 256).transpose(0, 1).reshape(-1, 512)) * 2,
        lambda x: gates(x.transpose(0, 1).reshape(x.shape)),
    ],
)
def test_what_else_runs_is_computed(changed: Callable[[Tensor], Tensor], replayed: list[object]) -> None:
    call_often(changed, [2, 1, 4] * 6)
    assert replayed


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x + 1,
        lambda x: x + x[:1],
        lambda x: torch.add(x, x, alpha=-2),
    ],
)
def test_a_run_in_which_torch_computes_is_not_replayed(
    changed: Callable[[Tensor], Tensor], replayed: list[object]
) -> None:
    def mixed(x: Tensor) -> Tensor:
        return gates(changed(silu_gate(torch.cat([x, x], 1))))

    call_often(mixed, [2, 1, 4] * 6)
    assert not replayed


def test_an_operator_that_forgets_to_compute_natively_is_not_replayed(replayed: list[object]) -> None:
    def half(x: Tensor) -> Tensor:
        return x * 0.5

    def in_place(x: Tensor) -> Tensor:
        output = empty(*x.shape, dtype=x.dtype)
        output.copy_(x)
        return output

    for operator in (half, in_place):
        native = native_operator(operator)
        call_often(lambda x, native=native: native(gates(x)), [2, 1] * 6)  # type: ignore[misc]
    assert not replayed


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_copies_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 4, 6, generator=torch.Generator().manual_seed(2)).to(dtype) * 100
    recording = Recording(ResultMemory())
    for view in (x, x[0], x[:, 1], x.transpose(1, 2), x.permute(2, 0, 1, 3), x[..., 1:5], x[:1, :, 1:2, :1]):
        other = view.flip(0).contiguous() / 3
        with recording.recording():
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
    second = memory.empty([15], torch.float32)
    assert second.data_ptr() != first.data_ptr()
    memory.drop(first[1:])
    assert memory.empty([2, 16], torch.bfloat16).data_ptr() == first.data_ptr()
    memory.drop(torch.ones(3))  # of others
    memory.drop_all()
    assert {memory.empty([15], torch.float32).data_ptr() for _ in range(2)} == {first.data_ptr(), second.data_ptr()}
