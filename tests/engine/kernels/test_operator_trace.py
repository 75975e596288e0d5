"""Traces do what their calls do, at any size; calls that can't be traced are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from engine.kernels.operator_trace import Example, UntraceableError, as_one_operator, trace

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
SIZES = (3, 2), (5, 7)


def example(tokens: int, kept: int) -> Example:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 6, generator=generator)
    return Example((tokens, kept), (x, torch.arange(kept) % tokens))


def traced(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return trace(call, *(example(*sizes) for sizes in SIZES))


def layers(x: Tensor, keep: Tensor) -> Tensor:
    """Views by size, constants, an in-place operator, several results, and a new tensor."""
    heads = (x @ WEIGHT).view(len(x), 2, 2).transpose(0, 1)
    first, second = heads.reshape(len(x) * 4).view(2 * len(x), 2).split([1, 1], dim=1)
    x = x + torch.cat([first, second]).view(len(x), 4).sum(1, keepdim=True)
    x += torch.arange(len(x))[:, None]
    return x[keep].expand(2, len(keep), 6)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 9), *SIZES, (70, 3)])
def test_the_same_at_any_size(sizes: tuple[int, int]) -> None:
    call = traced(layers)
    given = example(*sizes)
    before = given.inputs[0].clone()
    assert torch.equal(call(*given.sizes, *given.inputs), layers(*given.inputs))
    assert torch.equal(given.inputs[0], before)


def test_python_is_left_out() -> None:
    calls = []

    def call(x: Tensor, keep: Tensor) -> Tensor:
        calls.append(len(x))
        return x[keep] * 2

    run = traced(call)
    given = example(4, 4)
    assert torch.equal(run(*given.sizes, *given.inputs), given.inputs[0] * 2)
    assert calls == [3, 5]


def test_what_counts_as_one_operator_may_look_at_values() -> None:
    seen = []

    @as_one_operator
    def rows_above_zero(x: Tensor, *, times: int) -> Tensor:
        seen.append(len(x))
        rows = [row for row in x if row.sum() > 0]
        return torch.full((len(x),), float(len(rows) * times))

    def call(x: Tensor, keep: Tensor) -> Tensor:
        return rows_above_zero(x, times=3)[keep]

    run = traced(call)
    given = example(40, 40)
    assert torch.equal(run(*given.sizes, *given.inputs), call(*given.inputs))
    assert seen == [3, 5, 40, 40]


def test_inputs_that_are_not_tensors() -> None:
    parts = torch.ones(3), torch.ones(5)

    @as_one_operator
    def scale(pair: tuple[Tensor, str]) -> Tensor:
        return pair[0] * len(pair[1])

    pairs = (parts[0], "one"), (parts[1], "three")
    run = trace(scale, *(Example((len(pair[0]),), (pair,)) for pair in pairs))
    assert torch.equal(run(2, (torch.ones(2), "ab")), torch.full((2,), 2.0))


def test_an_operator_without_a_used_result_still_writes() -> None:
    store = torch.zeros(80)

    @as_one_operator
    def write(x: Tensor) -> None:
        store[: len(x)] += x[:, 0]
        inner(x)

    @as_one_operator
    def inner(x: Tensor) -> Tensor:
        return x.add_(1)

    def call(x: Tensor, keep: Tensor) -> Tensor:
        write(x)
        return x[keep]

    run = traced(call)
    store.zero_()
    given = example(70, 70)
    x = given.inputs[0].clone()
    assert torch.equal(run(*given.sizes, *given.inputs), x + 1)
    assert torch.equal(store[:70], x[:, 0])


def test_a_conversion_that_changes_nothing_is_no_operator() -> None:
    conversions: list[fx.Node] = []

    def change(graph: fx.Graph, constants: object) -> None:
        conversions.extend(node for node in graph.nodes if "to.dtype" in str(node.target))

    with torch.inference_mode():
        trace(lambda x, keep: x.to(x.dtype)[keep] * 2, *(example(*sizes) for sizes in SIZES), change=change)
    assert not conversions


def test_a_tensor_made_from_numbers_is_made_at_each_call() -> None:
    def call(x: Tensor, keep: Tensor) -> Tensor:
        count = torch.tensor([0.0])
        count += 1
        return x[keep] + count

    run = traced(call)
    given = example(4, 4)
    for _ in range(3):
        assert torch.equal(run(*given.sizes, *given.inputs), given.inputs[0] + 1)


def branches_on_a_value(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep] if x.sum() > 0 else -x[keep]


def reads_a_value(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep] * x.max().item()


def chooses_by_value(x: Tensor, keep: Tensor) -> Tensor:
    return x[x[:, 0] > 0]


def indexes_by_nonzero(x: Tensor, keep: Tensor) -> Tensor:
    return x[x[:, 0].nonzero()[:, 0]]


def is_one_longer(x: Tensor, keep: Tensor) -> Tensor:
    return torch.zeros(len(x) + 1)[keep]


def loops_over_tokens(x: Tensor, keep: Tensor) -> Tensor:
    return sum((row for row in x), torch.zeros(6))


def joins_tokens(x: Tensor, keep: Tensor) -> Tensor:
    return torch.stack(list(x.unbind()))[keep]


def branches_on_its_size(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep] * 2 if len(x) > 4 else x[keep] + 2


def makes_a_tensor_of_numbers(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep] * torch.tensor([float(len(x) + 1)])


def chooses_an_operator_by_size(x: Tensor, keep: Tensor) -> Tensor:
    double, triple = x[keep] * 2, x[keep] * 3
    return double + 1 if len(x) > 4 else triple + 1


def writes_another_number(x: Tensor, keep: Tensor) -> Tensor:
    return x[keep] * (len(x) ** 0.5)


@pytest.mark.parametrize(
    "call",
    [
        branches_on_a_value,
        reads_a_value,
        chooses_by_value,
        indexes_by_nonzero,
        is_one_longer,
        loops_over_tokens,
        joins_tokens,
        branches_on_its_size,
        makes_a_tensor_of_numbers,
        chooses_an_operator_by_size,
        writes_another_number,
    ],
)
def test_refusals(call: Callable[..., Tensor]) -> None:
    with pytest.raises(UntraceableError):
        traced(call)


def test_errors_of_the_call_are_its_own() -> None:
    def fails(x: Tensor, keep: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        traced(fails)
    assert torch.equal(traced(layers)(*example(2, 2).sizes, *example(2, 2).inputs), layers(*example(2, 2).inputs))
