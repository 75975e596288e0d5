"""Times of the Triton kernels beside torch's operators, on a GPU, with the shapes of an 8 B model's decoding step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention

from decoding.sampling.batch import SamplingBatch
from decoding.sampling.processors import COMMON
from decoding.sampling.sampler import _best, _scores
from engine.kernels.attention import AttentionArgs, RaggedBatch

_DEVICE = "cuda"
_HEADS, _KV_HEADS, _HEAD_DIM, _PAGE = 32, 8, 128, 16
_HIDDEN, _VOCAB = 4096, 128256
_FEATURES = {"qkv": (4096, 6144), "gate and up": (4096, 28672), "down": (14336, 4096), "output": (4096, _VOCAB)}
_TOKENS = (1, 8, 64, 384, 2048)
_ROWS = (1, 64, 384)
_BATCHES = ((1, 1, 2048), (1, 6, 32000), (64, 1, 2048), (64, 6, 2048), (1, 2048, 2048))  # rows, tokens each, columns
_CHOICES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "top_p": (0.8, 0, 0.9, 0.0),
    "top_k and top_p": (0.7, 20, 0.95, 0.0),
}


@dataclass(frozen=True, slots=True)
class KernelTime:
    """The median time of a kernel and of torch's operators for the same result."""

    name: str
    seconds: float
    torch_seconds: float
    least_bytes: int  # read and written if each byte is moved once

    @property
    def bytes_per_s(self) -> float:
        return self.least_bytes / self.seconds

    def __str__(self) -> str:
        return (
            f"{self.name:40} {self.seconds * 1e6:9.1f} µs {self.bytes_per_s / 1e9:7.0f} GB/s"
            f"   torch {self.torch_seconds * 1e6:9.1f} µs"
        )


def kernel_times() -> Iterator[KernelTime]:
    """Yield times of attention, the choice of tokens, products and norms on the current GPU."""
    for rows, width, columns in _BATCHES:
        yield _attention(rows, width, columns)
    for (name, setting), rows in product(_CHOICES.items(), _ROWS):
        yield _choice(name, setting, rows)
    for (name, (inputs, features)), tokens in product(_FEATURES.items(), _TOKENS):
        yield _product(name, inputs, features, tokens)
    yield _norm(64)


def _time(name: str, kernel: Callable[[], object], plain: Callable[[], object], least_bytes: int) -> KernelTime:
    from triton.testing import do_bench

    seconds, torch_seconds = (do_bench(call, return_mode="median") / 1e3 for call in (kernel, plain))
    return KernelTime(name, seconds, torch_seconds, least_bytes)


def _attention(rows: int, width: int, columns: int) -> KernelTime:
    """torch: its fused attention over keys and values without pages or gaps, the mask built already."""
    from engine.kernels.triton_attention import attend

    pages = columns // _PAGE
    batch, tables = text_batch(rows, width, columns, _DEVICE)
    keys = _random(rows * pages + 1, _KV_HEADS, _HEAD_DIM, _PAGE)
    values = _random(rows * pages + 1, _KV_HEADS, _PAGE, _HEAD_DIM)
    query, new = _random(rows * width, _HEADS, _HEAD_DIM), _random(rows * width, _KV_HEADS, _HEAD_DIM)
    plain_keys, plain_values = (_random(rows, _KV_HEADS, columns, _HEAD_DIM) for _ in range(2))
    args = AttentionArgs(query, new, new, keys, values, tables, batch, scale=0.1)
    queries = query.view(rows, width, _HEADS, _HEAD_DIM).transpose(1, 2)
    mask = torch.ones(width, columns, dtype=torch.bool, device=_DEVICE).tril(columns - width)
    return _time(
        f"attention {rows} × {width}, {columns} columns",
        lambda: attend(args),
        lambda: scaled_dot_product_attention(queries, plain_keys, plain_values, attn_mask=mask, enable_gqa=True),
        sum(tensor.nbytes for tensor in (plain_keys, plain_values, query, query, new, new)),
    )


def text_batch(rows: int, width: int, columns: int, device: str) -> tuple[RaggedBatch, Tensor]:
    """Return the last `width` tokens of texts of equal length, and page tables, [rows + 1, pages], in mixed order."""
    pages = -(-columns // _PAGE)
    order = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.cat([order.view(rows, pages), torch.zeros(1, pages, dtype=torch.int64)]).int()
    written = torch.arange(columns - width, columns).repeat(rows)
    nothing = torch.zeros_like(written)
    batch = RaggedBatch(
        slots=torch.arange(rows),
        offsets=torch.arange(rows + 1) * width,
        lengths=torch.full((rows,), columns),
        states=torch.tensor([], dtype=torch.int64),
        columns=written,
        positions=written,
        row_of=torch.arange(rows).repeat_interleave(width),
        trunks=written + 1,
        branches=nothing,
        near_branches=nothing,
    )
    return RaggedBatch._make(part.to(device) for part in batch), tables.to(device)


def _choice(name: str, setting: tuple[float, float, float, float], rows: int) -> KernelTime:
    """torch: the reference."""
    from decoding.kernels.triton_choice import choose

    logits = _random(rows, _VOCAB).float() * 3
    settings = torch.tensor([(*setting, row, 7) for row in range(rows)], dtype=torch.float64, device=_DEVICE)
    batch = SamplingBatch(settings, frozenset(COMMON) if setting[0] else frozenset())
    return _time(
        f"choice of {rows}, {name}",
        lambda: choose(logits, settings, 1),
        lambda: _best(_scores(logits, batch), 1),
        logits.nbytes,
    )


def _product(name: str, inputs: int, features: int, tokens: int) -> KernelTime:
    """torch: `linear`, whose order of summation depends on the number of tokens."""
    from engine.kernels.triton_linear import fixed_order_linear

    x, weight = _random(tokens, inputs), _random(features, inputs)
    dtype = torch.float32 if name == "output" else x.dtype
    return _time(
        f"product, {name}, {tokens} tokens",
        lambda: fixed_order_linear(x, weight, out_dtype=dtype),
        lambda: linear(x, weight),
        x.nbytes + weight.nbytes + tokens * features * dtype.itemsize,
    )


def _norm(tokens: int) -> KernelTime:
    from engine.kernels.triton_elementwise import fixed_order_rms_norm

    x, weight = _random(tokens, _HIDDEN), _random(_HIDDEN)
    return _time(
        f"norm, {tokens} tokens",
        lambda: fixed_order_rms_norm(x, weight, 1e-6),
        lambda: rms_norm(x, (_HIDDEN,), weight, 1e-6),
        2 * x.nbytes + weight.nbytes,
    )


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=_DEVICE)
