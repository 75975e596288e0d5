"""Blocks of GGUF files mean what the format's own package says."""

import gguf
import numpy as np
import pytest
import torch

from engine.loading.gguf.blocks import BLOCKS, quantized_blocks
from engine.loading.gguf.files import _STORED_BITS


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_read_exactly(kind: str) -> None:
    generator = np.random.default_rng(len(kind))
    quantization = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[quantization]
    assert size == BLOCKS[kind][1]
    data = generator.integers(0, 256, size=(6, 3 * size), dtype=np.uint8)
    blocks = data.reshape(-1, size)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(kind, (0, 2))
    if kind in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"):
        halves = (0,)
    for first in halves:  # any bits may be no number
        numbers = generator.normal(size=len(blocks)).astype(np.float16)
        blocks[:, first : first + 2] = numbers.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        blocks[:, 0] = generator.integers(100, 150, size=len(blocks))
    expected = gguf.quants.dequantize(data, quantization)
    weight = quantized_blocks(kind, data)
    offsets = 0 if weight.offsets is None else weight.offsets.nbytes
    assert 8 * (weight.codes.nbytes + weight.scales.nbytes + offsets) == _STORED_BITS[kind] * expected.size
    assert weight.shape == (6, 3 * weights)
    torch.testing.assert_close(weight.dequantized(), torch.from_numpy(expected), rtol=0, atol=0)
