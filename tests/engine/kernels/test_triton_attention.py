"""Attention in Triton computes what the reference computes: on a GPU if there is one, else in Triton's interpreter."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import DEVICE

from engine.kernels import attention as reference  # isort: skip
from engine.kernels import triton_attention  # isort: skip
from engine.kernels.attention import AttentionArgs, RaggedBatch, Reach  # isort: skip
from engine.kernels.triton_attention import Tiling  # isort: skip

PAGE = 16
SMALL = Tiling(part=64, block=32, split_tokens=16, partial_bytes=1 << 20)
UNDIVIDED = SMALL._replace(partial_bytes=0)
DIVIDED_IN_PART = SMALL._replace(partial_bytes=5000)
CHUNKS = Reach(30, in_chunks=True)
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Row(NamedTuple):
    length: int  # columns, new ones included
    tokens: int
    is_tree: bool = False


ROWS = [Row(140, 1), Row(64, 2), Row(90, 9, True), Row(1, 1), Row(70, 17)]
WHOLE_TREE = [Row(70, 64, True)]  # all 64 bits


class Case(AttentionArgs):
    def clone(self, **options: Any) -> "Case":
        values = None if self.values is None else self.values.clone()
        return self._replace(keys=self.keys.clone(), values=values, **options)


def make_case(
    rows: Sequence[Row],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 24,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    """Return random tokens, pages in random order, and NaN wherever nothing was written."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    width = -(-max(row.length for row in rows) // PAGE) + 1
    slots = rng.sample(range(len(rows) + 2), len(rows))
    tables = torch.zeros(len(rows) + 3, width, dtype=torch.int32)
    pages = rng.sample(range(1, len(rows) * width + 3), len(rows) * width)
    offsets, fields = [0], [list[int]() for _ in range(5)]
    for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        for page in range(-(-row.length // PAGE)):
            tables[slot, page] = pages.pop()
        for values in (token_fields(row, token, index, rng) for token in range(row.tokens)):
            for field, value in zip(fields, values, strict=True):
                field.append(value)
        offsets.append(offsets[-1] + row.tokens)
    columns, positions, row_of, trunks, branches = (torch.tensor(field) for field in fields)
    batch = RaggedBatch(
        torch.tensor(slots),
        torch.tensor(offsets),
        torch.tensor([row.length for row in rows]),
        torch.tensor([], dtype=torch.int64),
        *(columns, positions, row_of, trunks, branches, branches),
    )
    count = len(rows) * width + 3
    keys = torch.randn(count, kv_heads, size, PAGE, generator=generator).to(cache or dtype)
    values_ = torch.randn(count, kv_heads, PAGE, size, generator=generator).to(cache or dtype)
    for slot, row in zip(slots, rows, strict=True):
        if row.length % PAGE:
            last = tables[slot, row.length // PAGE]
            keys[last, :, :, row.length % PAGE :] = torch.nan
            values_[last, :, row.length % PAGE :] = torch.nan
    new = (torch.randn(offsets[-1], n, size, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads))
    on_device = (tensor.to(DEVICE) for tensor in (*new, keys, values_, tables))
    return Case._make((*on_device, RaggedBatch._make(part.to(DEVICE) for part in batch), 0.3, None, None, None))


def token_fields(row: Row, token: int, index: int, rng: random.Random) -> tuple[int, int, int, int, int]:
    """Return a token's column, position, row, trunk and branches. In a tree, each follows some of those before it."""
    start = row.length - row.tokens
    if not row.is_tree:
        return start + token, start + token, index, start + token + 1, 0
    path = [*rng.sample(range(token), rng.randint(0, token)), token]
    bits = sum(1 << node for node in path)
    return start + token, start + len(path) - 1, index, start, bits - (bits >> 63 << 64)


def attend(case: Case, tiling: Tiling = SMALL, **options: Any) -> Tensor:
    return triton_attention.attend(case.clone(**options), tiling)


@pytest.mark.parametrize(
    ("rows", "dtype", "options"),
    [
        (ROWS, torch.float32, {}),
        (ROWS, torch.bfloat16, {"reach": Reach(20)}),
        (ROWS, torch.bfloat16, {"reach": CHUNKS}),
        (ROWS, torch.float16, {"softcap": 5.0}),
        (ROWS, torch.float32, {"reach": Reach(40), "softcap": 30.0, "sinks": True}),
        (WHOLE_TREE, torch.bfloat16, {}),
    ],
    ids=["plain", "window", "chunks", "softcap", "all", "tree"],
)
def test_equals_the_reference(rows: Sequence[Row], dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make_case(rows, dtype=dtype)
    if options.get("sinks"):
        options = options | {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)}
    expected_case, actual_case = case.clone(**options), case.clone(**options)
    expected = reference.attend(expected_case)
    actual = triton_attention.attend(actual_case, SMALL)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for name in ("keys", "values"):
        written, wanted = getattr(actual_case, name), getattr(expected_case, name)
        torch.testing.assert_close(written[1:], wanted[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 3, 16), (6, 1, 40), (7, 1, 64)])
def test_groups_and_sizes(heads: int, kv_heads: int, size: int) -> None:
    case = make_case([Row(70, 3), Row(40, 6, True)], heads=heads, kv_heads=kv_heads, size=size)
    torch.testing.assert_close(attend(case), reference.attend(case.clone()), atol=5e-6, rtol=5e-6)


def test_eight_bit_keys_and_values() -> None:
    case = make_case(ROWS[:4], cache=torch.float8_e4m3fn)
    torch.testing.assert_close(attend(case), reference.attend(case.clone()), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(("heads", "dtype"), [(40, torch.float32), (6, torch.bfloat16)])
def test_values_that_are_the_beginnings_of_keys(heads: int, dtype: torch.dtype) -> None:
    case = make_case(ROWS[:4], heads=heads, kv_heads=1, size=40, dtype=dtype)
    case = case._replace(value=case.key[..., :32], values=None)
    keys = case.keys.clone()
    expected = reference.attend(case._replace(keys=keys))
    for tiling in (SMALL, UNDIVIDED):
        actual = triton_attention.attend(case, tiling)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(case.keys[1:], keys[1:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"reach": Reach(20)}, {"reach": CHUNKS}], ids=["plain", "window", "chunks"])
def test_bits_do_not_depend_on_how_the_work_is_divided(options: dict[str, Any]) -> None:
    case = make_case(ROWS[:3], dtype=torch.bfloat16)
    expected = attend(case, UNDIVIDED, **options)
    assert torch.equal(attend(case, **options), expected)
    assert torch.equal(attend(case, DIVIDED_IN_PART, **options), expected)


def test_bits_depend_on_the_text_alone() -> None:
    """The last of a text's tokens: in a chunk, after drafts, and alone, whatever row it is in."""
    case = make_case([Row(30, 1), Row(100, 30), Row(5, 5)], dtype=torch.bfloat16)
    together, batch = attend(case, UNDIVIDED), case.batch
    attended = case.clone()
    triton_attention.attend(attended, SMALL)  # writes the chunk
    for first, count in ((30, 1), (26, 5), (1, 1)):
        tokens = slice(first, first + count)
        alone = RaggedBatch._make(part[tokens] for part in batch)._replace(
            slots=batch.slots[1:2],
            offsets=torch.tensor([0, count], device=DEVICE),
            lengths=batch.columns[tokens][-1:] + 1,
            row_of=torch.zeros(count, dtype=torch.int64, device=DEVICE),
        )
        part = attended._replace(query=case.query[tokens], key=case.key[tokens], value=case.value[tokens], batch=alone)
        assert torch.equal(attend(part), together[tokens])
