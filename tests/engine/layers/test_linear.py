"""Packed linear layers give the same result as torch's own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from engine.kernels.native import library
from engine.layers import linear as native_linear
from engine.layers.faster_layers import use_faster_layers
from engine.layers.linear import JoinedLinear, NativeLinear, has_kernel, make_head_linears
from engine.layers.mlp import GatedMLP
from engine.layers.norm import TorchRMSNorm
from engine.layers.onednn_linear import PackedLinear, _largest_group, packed_linear, padded_size
from engine.layers.packing import pack_linears
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, tiny_model
from tests.support.process_memory import native_bytes
from tests.support.processors import FAST_DTYPES, needs_bfloat16

KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
SHAPES = [(96, 48), (1, 2), (17, 514), (200, 1100), (64, 576)]  # with parts of panels, and several parts of the sums
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 2e-2, marks=needs_bfloat16)]
)
def test_a_packed_layer_equals_the_layer(dtype: torch.dtype, tolerance: float, bias: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    linear = nn.Linear(48, 96, bias=bias, dtype=dtype).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.normal_(std=0.2, generator=generator)
    x = torch.randn(1, tokens, 48, generator=generator).to(dtype)
    torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x), atol=tolerance, rtol=tolerance)


def test_replacements_on_a_gpu_compute_the_same() -> None:
    """Run on the CPU here."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 5, 48, generator=generator)
    parts = [nn.Linear(48, size).requires_grad_(False) for size in (32, 16, 16)]
    joined = JoinedLinear(torch.cat([part.weight for part in parts]), torch.cat([part.bias for part in parts]))
    torch.testing.assert_close(joined(x), torch.cat([part(x) for part in parts], dim=-1))
    norm = LlamaRMSNorm(48, eps=1e-5)
    torch.testing.assert_close(TorchRMSNorm(norm.weight, 1e-5)(x), norm(x))


@pytest.mark.parametrize("kernel", [NativeLinear, PackedLinear])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_packed_model_gives_the_same_logits(
    family: str, kernel: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By our kernel, and by oneDNN, which pads."""
    if kernel is PackedLinear:
        monkeypatch.setattr(native_linear, "has_kernel", lambda weight: False)
    rows = [RowInput(0, 0, [3, 1, 4, 1, 5]), RowInput(2, 0, [9, 2])]
    expected = Runner(tiny_model(family), slots=3, max_length=16, max_query=8).logits(rows)
    model = tiny_model(family)
    use_faster_layers(model)
    kinds = {type(module) for module in model.modules()} & {nn.Linear, NativeLinear, PackedLinear}
    assert kinds == {kernel}
    gated = {"llama", "llama-gqa", "llama4", "qwen3", "mistral", "mistral-window", "minicpm3", "deepseek"}
    native = library() is not None and family in gated
    assert any(isinstance(module, GatedMLP) for module in model.modules()) == native
    assert any("forward" in vars(module) for module in model.modules()) >= (
        native and family != "llama4"
    )  # native rotation
    logits = Runner(model, slots=3, max_length=16, max_query=8).logits(rows)
    torch.testing.assert_close(logits, expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(("layers", "padded"), [("ours", 17), ("oneDNN's", 18), ("torch's", 18)])
def test_batches_are_padded_for_layers_that_need_it(layers: str, padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if layers == "oneDNN's":
        monkeypatch.setattr(native_linear, "has_kernel", lambda weight: False)
    model = tiny_model("llama")
    if layers != "torch's":
        use_faster_layers(model)
    runner = Runner(model, slots=3, max_length=32, max_query=32)
    runner.logits([RowInput(0, 0, [1])])
    tokens = runner._forward.pack([RowInput(0, 0, [1] * 17)]).tokens
    assert tokens.numel() == padded


def test_packed_layers_compute_few_numbers_of_tokens() -> None:
    sizes = [padded_size(tokens) for tokens in range(1, 1025)]
    assert sizes[:16] == [2, *range(2, 17)]
    assert all(tokens <= size <= tokens * 9 / 8 for tokens, size in enumerate(sizes[1:], 2))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 15 + 6 * 8


@pytest.mark.parametrize("dtype", FAST_DTYPES)
def test_padding_changes_no_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    packed = PackedLinear(torch.randn(96, 176, generator=generator).to(dtype), None)
    for tokens in (17, 33, 61, 129):
        x = torch.randn(1, tokens, 176, generator=generator).to(dtype)
        exact = torch.ops.mkldnn._linear_pointwise(x, packed.weight, None, "none", [], "")
        assert torch.equal(packed(x), exact)


def test_memory_does_not_grow_with_the_number_of_sizes() -> None:
    """oneDNN's cache and torch's own have an entry for each number of tokens."""
    packed = PackedLinear(torch.randn(96, 80), None)
    x = torch.randn(256, 80)
    before = native_bytes()
    for tokens in range(1, 257):
        packed(x[:tokens])
    assert native_bytes() - before < 60 * 2**20  # without padding more than 100 MiB


def test_numbers_of_tokens_that_round_alike_are_found_and_used() -> None:
    x = torch.randn(20, 80, generator=torch.Generator().manual_seed(3))
    others = x.clone()
    others[0] += 1
    assert _largest_group([others[:2], x[:4], x[:8], x[:16]]) == [4, 8, 16]
    packed = PackedLinear(torch.randn(96, 80), None)
    for tokens in (1, 5, 8, 20):
        assert torch.equal(packed_linear(x[:tokens], packed.weight, None, [4, 8]), packed(x[:tokens]))


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
def test_heads_have_the_bits_of_layers_of_their_own(dtype: torch.dtype) -> None:
    weight, x = random(3, 70, 96, dtype=dtype, seed=6), random(2, 110, 3, 96, dtype=dtype, seed=7)
    layer, parts = make_head_linears(weight), [NativeLinear(part, None) for part in weight]
    expected = torch.stack([part(x[..., head, :]) for head, part in enumerate(parts)], dim=-2)
    assert isinstance(layer, NativeLinear)
    assert torch.equal(layer(x), expected)
    for count in (1, 13, 17, 96):
        assert torch.equal(layer(x[0, -count:]), expected[0, -count:])


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
    weight, x = random(3, 24, 64, dtype=torch.float32, seed=8), random(9, 3, 64, dtype=torch.float32, seed=9)
    expected = torch.einsum("nhi,hoi->nho", x, weight)
    torch.testing.assert_close(make_head_linears(weight)(x), expected, rtol=1e-5, atol=1e-4)


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
