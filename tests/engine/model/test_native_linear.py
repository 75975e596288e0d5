"""Linear layers in C++ compute what torch's do, and give a token the same bits in every batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from engine.model.native import linear as native_linear
from engine.model.native.linear import NativeLinear, has_kernel
from engine.model.packed_linear import PackedLinear, pack_linears

KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
SHAPES = [(96, 48), (1, 2), (17, 514), (200, 1100), (64, 576)]  # with parts of panels, and several parts of the sums
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "out_dtype"), KINDS)
def test_results_are_those_of_torch(
    dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int], bias: bool
) -> None:
    weight, x = random(*shape, dtype=dtype, seed=0), random(2, 70, shape[1], dtype=dtype, seed=1)
    offsets = random(shape[0], dtype=dtype, seed=2) if bias else None
    expected = linear(x.double(), weight.double(), None if offsets is None else offsets.double())
    result = NativeLinear(weight, offsets, out_dtype=out_dtype)(x)
    assert (result.dtype, result.shape) == (out_dtype, expected.shape)
    assert (result - expected).abs().max() <= TOLERANCES[out_dtype] * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "out_dtype"), KINDS)
def test_a_token_has_the_same_bits_in_every_batch(
    dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = random(300, shape[1], dtype=dtype, seed=3)
    layer = NativeLinear(
        random(*shape, dtype=dtype, seed=4), random(shape[0], dtype=dtype, seed=5), out_dtype=out_dtype
    )
    expected = layer(x)
    for count in (0, *range(1, 30), 95, 96, 97, 200):
        assert torch.equal(layer(x[:count]), expected[:count])
        assert torch.equal(layer(x[300 - count :]), expected[300 - count :])


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_token_has_the_same_bits_with_every_number_of_threads(dtype: torch.dtype) -> None:
    layer, x = NativeLinear(random(200, 1100, dtype=dtype, seed=6), None), random(40, 1100, dtype=dtype, seed=7)
    threads, expected = torch.get_num_threads(), layer(x)
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            assert torch.equal(layer(x), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_inputs_of_another_kind_are_refused(dtype: torch.dtype) -> None:
    layer = NativeLinear(random(24, 64, dtype=dtype, seed=8), None)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    for x in (torch.zeros(3, 64, dtype=other), torch.zeros(3, 63, dtype=dtype), torch.zeros(3, 128, dtype=dtype)):
        with pytest.raises(ValueError, match=r"inputs are \d+ features in"):
            layer(x)


def test_inputs_may_be_parts_of_others() -> None:
    weight, x = random(24, 64, dtype=torch.float32, seed=8), random(9, 128, dtype=torch.float32, seed=9)
    torch.testing.assert_close(NativeLinear(weight, None)(x[:, 64:]), linear(x[:, 64:], weight), rtol=1e-5, atol=1e-5)


def test_there_is_no_kernel_for_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_kernel(torch.zeros(3, 4))
    assert has_kernel(torch.zeros(3, 4, dtype=torch.bfloat16))
    assert not has_kernel(torch.zeros(3, 5, dtype=torch.bfloat16))  # no pairs
    assert not has_kernel(torch.zeros(3, 4, dtype=torch.float16))
    assert not has_kernel(torch.zeros(3, 4, device="meta"))
    slow = SimpleNamespace(linear_panel=lambda: 0)  # a processor that can't multiply and add at once
    for built in (None, slow):
        monkeypatch.setattr(native_linear, "library", lambda built=built: built)
        assert not has_kernel(torch.zeros(3, 4))


def test_without_a_compiler_one_dnn_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "library", lambda: None)
    model = nn.ModuleList([nn.Linear(48, 96)]).requires_grad_(False)
    pack_linears(model)
    assert [type(layer) for layer in model] == [PackedLinear]


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_it_computes_whatever_instructions_one_dnn_has(
    dtype: torch.dtype, instructions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OneDNN's products depend on the batch where it uses AMX."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions)
    model = nn.ModuleList([nn.Linear(48, 96)]).to(dtype).requires_grad_(False)
    pack_linears(model)
    assert [type(layer) for layer in model] == [NativeLinear]
