"""Attention over pages: the kernel computes the reference, and a token's bits do not depend on its company."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import attention as reference
from engine.kernels import native_attention as native
from engine.kernels.attention import AttentionArgs, Reach
from engine.kernels.native import library
from engine.model.ragged_batch import RowInput, pack_inputs

PAGE = 16
needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}

Attend = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@dataclass(frozen=True)
class Layer:
    """What an attention layer computes with."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    reach: Reach | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False  # whether a value is the beginning of its key

    def options(self) -> dict[str, Any]:
        sinks = torch.linspace(-1, 2, self.heads).to(self.dtype) if self.sinks else None
        return {"scale": 1.7 * self.key_dim**-0.5, "reach": self.reach, "softcap": self.softcap, "sinks": sinks}


class Text:
    """A text's queries, keys and values by position; [T, heads, D] each."""

    def __init__(self, layer: Layer, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = (layer.heads, layer.key_dim), (layer.kv_heads, layer.key_dim), (layer.kv_heads, layer.value_dim)
        self.states = [torch.randn(length, *shape, generator=generator).to(layer.dtype) for shape in shapes]
        if layer.latent:
            self.states[2] = self.states[1][..., : layer.value_dim]

    def __len__(self) -> int:
        return len(self.states[0])


class Pages:
    """Pages of several slots in random order, with values in them from the start."""

    def __init__(self, layer: Layer, slots: int, capacity: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        per_slot = -(-capacity // PAGE)
        order = torch.randperm(slots * per_slot, generator=generator)
        self.tables = torch.zeros(slots + 1, per_slot, dtype=torch.int32)
        self.tables[:slots] = (order.view(slots, per_slot) + 1).int()
        dtype = layer.page_dtype or layer.dtype
        shapes = (layer.kv_heads, layer.key_dim, PAGE), (layer.kv_heads, PAGE, layer.value_dim)
        count = slots * per_slot + 1
        self.keys, self.values = (torch.randn(count, *shape, generator=generator).to(dtype) for shape in shapes)

    def run(self, layer: Layer, attend: Attend, rows: list[tuple[RowInput, list[Tensor]]]) -> list[Tensor]:
        """Return each row's outputs, [Q, heads, Dv]. rows: inputs, and the states of their tokens."""
        _, _, batch = pack_inputs([row for row, _ in rows], reach=layer.reach).unpack()
        states = [torch.cat(parts) for parts in zip(*(states for _, states in rows), strict=True)]
        # As models have them.
        query, key, value = (part.transpose(0, 1).contiguous().transpose(0, 1) for part in states)
        stores = self.keys, None if layer.latent else self.values, self.tables
        output = attend(AttentionArgs(query, key, value, *stores, batch, **layer.options()))
        return list(output.split([len(row.tokens) for row, _ in rows]))


def chunk(slot: int, text: Text, start: int, end: int) -> tuple[RowInput, list[Tensor]]:
    return RowInput(slot, start, [0] * (end - start)), [part[start:end] for part in text.states]


def tree(
    rng: random.Random, slot: int, text: Text, start: int, others: Text
) -> tuple[RowInput, list[Tensor], list[int]]:
    """Return the text from `start` on as a path of a tree among other nodes, and the indices of its nodes."""
    count = len(text) - start
    extra = rng.randint(0, min(8, 63 - count))
    is_text = [True] * count + [False] * extra
    rng.shuffle(is_text)
    paths: list[list[int]] = []
    nodes: list[int] = []
    states = [[] for _ in text.states]  # type: list[list[Tensor]]
    for index, own in enumerate(is_text):
        above = paths[nodes[-1]] if own and nodes else [] if own else rng.choice([[], *paths])
        paths.append([*above, start + index])
        source, position = (text, start + len(nodes)) if own else (others, index)
        for part, values in zip(states, source.states, strict=True):
            part.append(values[position])
        if own:
            nodes.append(index)
    row = RowInput(slot, start, [0] * len(paths), trunk=start, paths=paths)
    return row, [torch.stack(part) for part in states], nodes


def whole(layer: Layer, attend: Attend, text: Text) -> Tensor:
    """Return the outputs of a text in one call, alone: [T, heads, Dv]."""
    return Pages(layer, 1, len(text), 0).run(layer, attend, [chunk(0, text, 0, len(text))])[0]


CHUNKS = [Reach(size, in_chunks=True) for size in (1, 7, 64, 200)]
LAYERS = st.builds(
    Layer,
    heads=st.sampled_from([6, 12]),
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    key_dim=st.sampled_from([8, 12, 64, 80]),
    value_dim=st.sampled_from([8, 12, 64, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    page_dtype=st.sampled_from([None, None, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]),
    reach=st.sampled_from([None, None, *map(Reach, (1, 5, 40, 150)), *CHUNKS]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    sinks=st.booleans(),
)


LATENT = st.builds(
    Layer,
    heads=st.sampled_from([6, 32]),
    kv_heads=st.sampled_from([1, 2]),
    key_dim=st.sampled_from([80, 132]),
    value_dim=st.sampled_from([8, 64, 76]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    page_dtype=st.sampled_from([None, torch.float8_e4m3fn]),
    reach=st.sampled_from([None, Reach(40)]),
    latent=st.just(True),
)
LAYERS |= LATENT


@needs_compiler
@settings(max_examples=80, deadline=None, derandomize=True)
@given(layer=LAYERS, seed=st.integers(0, 1000), length=st.integers(1, 300))
def test_native_computes_the_reference(layer: Layer, seed: int, length: int) -> None:
    """Several rows in one call: a text, single tokens, and a tree."""
    rng = random.Random(seed)
    texts = [Text(layer, rng.randint(1, length), seed + index) for index in range(4)]
    outputs = []
    for attend in (reference.attend, native.attend):
        pages = Pages(layer, 4, length + 80, seed)
        pages.run(layer, attend, [chunk(slot, text, 0, len(text)) for slot, text in enumerate(texts)])
        steps = [chunk(slot, text, len(text) - 1, len(text)) for slot, text in enumerate(texts[1:], 1)]
        start = max(0, len(texts[0]) - 5)
        row, states, _ = tree(random.Random(seed), 0, texts[0], start, Text(layer, 80, seed))
        outputs.append((torch.cat(pages.run(layer, attend, [(row, states), *steps])), pages.keys, pages.values))
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        tolerance = TOLERANCES[layer.dtype]
        torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance * 4, rtol=tolerance)


@needs_compiler
@settings(max_examples=100, deadline=None, derandomize=True)
@given(layer=LAYERS, seed=st.integers(0, 1000), length=st.integers(1, 400))
def test_a_token_has_the_same_bits_in_any_company(layer: Layer, seed: int, length: int) -> None:
    """In chunks, beside other rows, as a path of a tree, in other pages, with more threads."""
    rng = random.Random(seed)
    text, other = Text(layer, length, seed), Text(layer, 400, seed + 1)
    torch.set_num_threads(1)
    expected = whole(layer, native.attend, text)
    torch.set_num_threads(rng.choice([1, 2, 3]))
    pages = Pages(layer, 3, 500, seed)
    slot = rng.randrange(3)
    in_tree = rng.randint(0, min(length, 20))
    start = 0
    while start < length - in_tree:
        end = min(length - in_tree, start + rng.choice([1, 1, 7, 60, 250]))
        rows = [chunk(slot, text, start, end)]
        if rng.random() < 0.7:
            cut = rng.randrange(len(other))
            rows.insert(
                rng.randint(0, 1), chunk((slot + 1) % 3, other, cut, min(len(other), cut + rng.choice([1, 9, 90])))
            )
        outputs = pages.run(layer, native.attend, rows)
        index = next(index for index, (row, _) in enumerate(rows) if row.slot == slot)
        assert torch.equal(outputs[index], expected[start:end])
        start = end
    if in_tree:
        row, states, nodes = tree(rng, slot, text, start, other)
        outputs = pages.run(layer, native.attend, [chunk((slot + 2) % 3, other, 0, 30), (row, states)])
        assert torch.equal(outputs[1][nodes], expected[start:])


@needs_compiler
@pytest.mark.parametrize("reach", [None, Reach(2100), Reach(2100, in_chunks=True)])
def test_long_texts_are_split_in_the_same_way_by_any_number_of_threads(reach: Reach | None) -> None:
    layer = Layer(heads=3, kv_heads=1, key_dim=32, value_dim=32, dtype=torch.bfloat16, reach=reach, sinks=True)
    text = Text(layer, 4400, 1)
    torch.set_num_threads(1)
    expected = whole(layer, native.attend, text)
    torch.testing.assert_close(expected[-60:], whole(layer, reference.attend, text)[-60:], atol=8e-3, rtol=8e-3)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        pages = Pages(layer, 2, 4500, threads)
        pages.run(layer, native.attend, [chunk(1, text, 0, 4370)])
        row, states, nodes = tree(random.Random(threads), 1, text, 4370, text)
        outputs = pages.run(layer, native.attend, [chunk(0, text, 0, 1), (row, states)])
        assert torch.equal(outputs[1][nodes], expected[4370:])


@pytest.mark.parametrize("attend", [reference.attend, pytest.param(native.attend, marks=needs_compiler)])
def test_what_lies_beyond_a_row_does_not_matter(attend: Attend) -> None:
    """Pages may hold anything in columns that no token sees, not-a-number included."""
    layer = Layer(reach=Reach(20))
    text = Text(layer, 50, 3)
    expected = whole(layer, attend, text)
    pages = Pages(layer, 2, 64, 3)
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    for start, end in ((0, 30), (30, 50)):
        output = pages.run(layer, attend, [chunk(1, text, start, end)])[0]
        torch.testing.assert_close(output, expected[start:end])
