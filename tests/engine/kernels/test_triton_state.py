"""Recurrences and convolutions in Triton compute the reference: on a GPU if there is one, else in the interpreter."""

from typing import Any

import pytest
import torch

from tests.support.interpreter import DEVICE

from engine.kernels import state as reference  # isort: skip
from engine.kernels import triton_state  # isort: skip
from engine.model.ragged_batch import RowInput  # isort: skip
from tests.support.states import SHAPES, StateSteps, random_text  # isort: skip

FUNCTIONS: dict[str, Any] = dict.fromkeys(SHAPES, (triton_state.recur, reference.recur))
FUNCTIONS["convolution"] = triton_state.convolve, reference.convolve
KINDS = [pytest.param(kind, marks=[] if kind == "convolution" else pytest.mark.slow) for kind in FUNCTIONS]


@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_computes_the_reference_by_the_text_alone(kind: str) -> None:
    kernel, plain = FUNCTIONS[kind]
    layer, expected, text = StateSteps(kind, kernel, DEVICE), StateSteps(kind, plain), random_text(36, 1)
    for each in (layer, expected):
        each.rows.begin(1, [b"one", b"two"], 0, 0)  # takes a snapshot after two pages
    outputs = layer.run_in_chunks(text, seed=2)
    torch.testing.assert_close(outputs, expected.run_in_chunks(text, seed=2), rtol=1e-4, atol=1e-5)
    for name, part in expected.memory.items():
        torch.testing.assert_close(layer.memory[name].cpu(), part, rtol=1e-4, atol=1e-5)
    layer.rows.clear(1)
    assert torch.equal(layer.run([RowInput(1, 0, text)]), outputs)
