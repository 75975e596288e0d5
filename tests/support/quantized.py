"""Random weights of 4 and 8 bits."""

from typing import NamedTuple

import torch

from engine.kernels.quantized_weight import QuantizedWeight, pack_codes


class Layout(NamedTuple):
    """How a weight is stored."""

    bits: int
    group: int
    rows: int
    size: int
    offsets: bool
    scale_dtype: torch.dtype
    floats: bool = False
    table: bool = False


LAYOUTS = (
    Layout(4, 32, 100, 1568, True, torch.float16),
    Layout(8, 32, 72, 544, False, torch.float16),
    Layout(4, 128, 96, 256, True, torch.float32),
    Layout(8, 64, 40, 64, True, torch.float32),
    Layout(4, 16, 65, 1040, False, torch.float32),
    Layout(8, 96, 33, 96, False, torch.float32),
    Layout(8, 64, 72, 256, False, torch.float32, floats=True),
    Layout(4, 32, 50, 288, False, torch.float32, table=True),
)


def random_weight(layout: Layout, *, device: str = "cpu") -> QuantizedWeight:
    """Return a weight whose scales and offsets differ from group to group."""
    generator = torch.Generator().manual_seed(layout.rows)
    shape = layout.rows, layout.size // layout.group
    codes = torch.randint(0, 1 << layout.bits, (layout.rows, layout.size), dtype=torch.uint8, generator=generator)
    if layout.floats:
        codes[codes & 127 == 127] = 0  # no number
        codes[:2, :128] = torch.arange(128, dtype=torch.uint8) % 127  # each number once
    scales = torch.rand(*shape, generator=generator) * 0.3 / (1 << layout.bits)
    offsets = torch.rand(*shape, generator=generator) - 0.5
    return QuantizedWeight(
        codes=pack_codes(codes, layout.bits).to(device),
        scales=scales.to(device, layout.scale_dtype),
        offsets=offsets.to(device, layout.scale_dtype) if layout.offsets else None,
        bits=layout.bits,
        table=torch.randn(16, generator=generator).bfloat16().float().to(device) if layout.table else None,
        floats=layout.floats,
    )


def experts_of(layout: Layout, count: int, *, device: str = "cpu") -> QuantizedWeight:
    """Return the weight of experts that differ."""
    weight = random_weight(layout._replace(rows=count * layout.rows), device=device)
    rows = torch.arange(count * layout.rows, device=device)
    return QuantizedWeight.stacked([weight.rows(own) for own in rows.chunk(count)])
