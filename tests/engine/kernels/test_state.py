"""Recurrences and convolutions in C++ compute the reference, and a token's bits depend on its text alone."""

from typing import Any

import pytest
import torch

from engine.kernels import native_state
from engine.kernels import state as reference
from engine.kernels.native import library
from engine.model.ragged_batch import RowInput
from tests.support.states import SHAPES, StateSteps, random_text

needs_compiler = pytest.mark.skipif(library() is None, reason="no C++ compiler")
FUNCTIONS: dict[str, Any] = dict.fromkeys(SHAPES, (native_state.recur, reference.recur))
FUNCTIONS["convolution"] = native_state.convolve, reference.convolve


@needs_compiler
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_the_kernel_computes_the_reference(kind: str) -> None:
    layers = [StateSteps(kind, function) for function in FUNCTIONS[kind]]
    text = random_text(50, 1)
    results = []
    for layer in layers:
        layer.rows.begin(1, [b"one", b"two"], 0, 0)  # takes a snapshot after two pages
        results.append(layer.run_in_chunks(text, seed=2))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for part in layers[0].memory:
        torch.testing.assert_close(layers[0].memory[part], layers[1].memory[part], rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_bits_depend_on_the_text_alone(kind: str) -> None:
    layer, text = StateSteps(kind, FUNCTIONS[kind][0]), random_text(60, 1)
    whole = layer.run([RowInput(1, 0, text)])
    for seed in range(4):
        layer.rows.clear(1)
        assert torch.equal(layer.run_in_chunks(text, seed), whole)
