"""Triton kernels on a GPU, at real sizes: the reference's results, with bits that do not depend on company.

The tests of the same kernels that run in Triton's interpreter elsewhere run on the GPU too.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernels import text_batch
from decoding.sampling.batch import SamplingBatch
from decoding.sampling.processors import COMMON
from decoding.sampling.sampler import _best, _scores
from engine.kernels import attention as reference
from engine.kernels.attention import AttentionArgs, RaggedBatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def pages_of(tables: Tensor) -> tuple[Tensor, Tensor]:
    count = int(tables.max()) + 1
    return random(count, KV_HEADS, SIZE, PAGE, seed=1), random(count, KV_HEADS, PAGE, SIZE, seed=2)


def args(
    new: Sequence[Tensor], stores: tuple[Tensor, Tensor], tables: Tensor, batch: RaggedBatch, **options: Any
) -> AttentionArgs:
    query, key, value = new
    return AttentionArgs(query, key, value, *stores, tables, batch, scale=0.09, **options)


def attend(
    new: Sequence[Tensor], stores: tuple[Tensor, Tensor], tables: Tensor, batch: RaggedBatch, **options: Any
) -> Tensor:
    """new: query, key and value."""
    from engine.kernels import triton_attention

    return triton_attention.attend(args(new, stores, tables, batch, **options))


@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 1, 5000), (5, 6, 2000), (2, 700, 1500), (64, 1, 40)])
def test_attention(rows: int, width: int, columns: int) -> None:
    batch, tables = text_batch(rows, width, columns, "cuda")
    stores = pages_of(tables)
    new = [random(rows * width, heads, SIZE, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    cases: list[dict[str, Any]] = [{}, {"window": 128}, {"softcap": 30.0, "sinks": random(HEADS)}]
    for options in cases:
        actual = attend(new, stores, tables, batch, **options)
        expected = reference.attend(args(new, stores, tables, batch, **options))
        torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)


def test_attention_gives_a_token_the_same_bits_in_any_company() -> None:
    """The end of a text: in a chunk of 300, as drafts of a step, alone, and among 31 other rows."""
    columns, width = 3000, 300
    batch, tables = text_batch(32, width, columns, "cuda")
    stores = pages_of(tables)
    new = [random(32 * width, heads, SIZE, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    together = attend(new, stores, tables, batch)
    offsets = torch.arange(33, device="cuda")
    for count in (1, 2, 6, 17):
        for rows in (1, 32):
            tokens = (torch.arange(rows)[:, None] * width + torch.arange(width - count, width)).flatten().cuda()
            part = RaggedBatch._make(field[tokens] if len(field) == 32 * width else field for field in batch)
            part = part._replace(
                slots=batch.slots[:rows], lengths=batch.lengths[:rows], offsets=offsets[: rows + 1] * count
            )
            alone = attend([tensor[tokens] for tensor in new], stores, tables, part)
            assert torch.equal(alone, together[tokens]), (count, rows)


def test_attention_in_a_graph_reads_lengths_from_the_device() -> None:
    batch, tables = text_batch(3, 2, 1200, "cuda")
    other, _ = text_batch(3, 2, 700, "cuda")
    stores = pages_of(tables)
    new = [random(6, heads, SIZE, seed=heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    expected = attend(new, stores, tables, other)
    attend(new, stores, tables, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attend(new, stores, tables, batch)
    for buffer, values in zip(batch, other, strict=True):
        buffer.copy_(values)
    graph.replay()
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    "setting",
    [(1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (0.9, 0, 0.9, 0.0), (1.2, 40, 0.8, 0.05)],
    ids=["temperature", "top_k", "top_p", "all"],
)
def test_a_million_choices(setting: tuple[float, ...]) -> None:
    """250 000 draws of each setting. The reference runs on the GPU, too."""
    from decoding.kernels.triton_choice import choose

    rows = 25_000
    keys = torch.randint(-(2**31), 2**31, (10, rows, 2), generator=torch.Generator().manual_seed(0))
    for step, step_keys in enumerate(keys):
        logits = random(rows, 500, seed=step, dtype=torch.float32) * 3
        settings = torch.cat([torch.tensor(setting).double().expand(rows, 4), step_keys.double()], dim=1).cuda()
        expected, scores = _best(_scores(logits, SamplingBatch(settings, frozenset(COMMON))), 1)
        actual, actual_scores = choose(logits, settings, 1)
        torch.testing.assert_close(actual_scores, scores, rtol=2e-7, atol=0)
        assert torch.equal(actual, expected)


def test_choices_from_a_large_vocabulary() -> None:
    from decoding.kernels.triton_choice import choose

    logits = random(64, 128256, dtype=torch.float32) * 3
    settings = torch.tensor([(0.2 + row / 30, row % 3 * 20, 0.5 + row / 128, 0.0, row, -row) for row in range(64)])
    settings = settings.double().cuda()
    expected, scores = _best(_scores(logits, SamplingBatch(settings, frozenset(COMMON))), 3)
    actual, actual_scores = choose(logits, settings, 3)
    torch.testing.assert_close(actual_scores, scores, rtol=2e-7, atol=0)
    assert torch.equal(actual[scores > -torch.inf], expected[scores > -torch.inf])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("inputs", "features"), [(4096, 6144), (576, 1000)])
def test_products_give_a_token_the_same_bits_in_any_company(dtype: torch.dtype, inputs: int, features: int) -> None:
    from engine.kernels.triton_linear import fixed_order_linear

    x, weight = random(1100, inputs, dtype=dtype), random(features, inputs, seed=1, dtype=dtype) * inputs**-0.5
    together = fixed_order_linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(together, x.float() @ weight.float().T, atol=1e-3, rtol=1e-3)
    for count in (1, 2, 5, 16, 17, 64, 65, 128, 129, 384, 1023, 1024):
        assert torch.equal(fixed_order_linear(x[:count], weight, out_dtype=torch.float32), together[:count]), count
        assert torch.equal(fixed_order_linear(x[-count:], weight, out_dtype=torch.float32), together[-count:]), count


def test_a_large_product_in_a_graph_reads_what_is_there_then() -> None:
    """Its descriptors are made when it is captured."""
    from engine.kernels.triton_linear import fixed_order_linear

    x, other, weight = random(300, 1024), random(300, 1024, seed=2), random(1500, 1024, seed=1)
    expected = fixed_order_linear(other, weight)
    fixed_order_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = fixed_order_linear(x, weight)
    x.copy_(other)
    graph.replay()
    assert torch.equal(output, expected)


def test_norms_give_a_token_the_same_bits_in_any_company() -> None:
    from engine.kernels.triton_elementwise import fixed_order_rms_norm

    x, weight = random(300, 4096), random(4096, seed=1)
    together = fixed_order_rms_norm(x, weight, 1e-6)
    for count in (1, 2, 17, 299):
        assert torch.equal(fixed_order_rms_norm(x[:count], weight, 1e-6), together[:count])
