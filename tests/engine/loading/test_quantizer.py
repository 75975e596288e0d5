"""Folders of rounded weights: what is written is what was computed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.errors import ConfigError
from deployments.configuration.paths import ROOT
from engine.layers.faster_layers import use_faster_layers
from engine.layers.quantized_experts import QuantizedExperts
from engine.layers.quantized_linear import QuantizedLinear, QuantizedModule
from engine.loading.checkpoint import ModelSpec, load_config, load_model, save_rounded
from engine.loading.quantizer import IntegerConfig, IntegerQuantizer
from tests.families.configurations import make_config, make_model, save_model


def spec(path: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(path), "device": "cpu", "dtype": "float32", **options})


@pytest.mark.parametrize("family", ["llama", "mamba2", "mixtral", "gpt_oss"])
@torch.no_grad()
def test_a_rounded_model_computes_with_its_unpacked_weights(family: str, tmp_path: Path) -> None:
    """Mamba's models convert inputs to the type of the output layer's weight, GPT-OSS transposes its experts."""
    save_model(family, make_model(make_config(family)), tmp_path)
    rounded, plain = load_model(spec(tmp_path, quantization="int8")), load_model(spec(tmp_path))
    for name, layer in rounded.named_modules():
        if isinstance(layer, QuantizedModule):
            plain.get_parameter(f"{name}.weight").copy_(layer.quantized.dequantized())
        elif isinstance(layer, QuantizedExperts):
            for matrix in layer.matrices:
                weight = layer.quantized(matrix).dequantized()
                plain.get_parameter(f"{name}.{matrix}").copy_(weight.mT if layer.is_transposed else weight)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    torch.testing.assert_close(rounded(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["gemma3", "gpt_neox", "mixtral"])
def test_a_folder_has_the_names_by_which_its_weights_are_found(family: str, tmp_path: Path) -> None:
    """Files may have others than modules, as those of multimodal checkpoints and of older families do."""
    source, folder = tmp_path / "source", tmp_path / "int8"
    save_model(family, make_model(make_config(family)), source)
    rounded = load_model(spec(source, quantization="int8"))
    save_rounded(rounded, str(source), folder)
    states = load_model(spec(folder)).state_dict()
    assert states.keys() == rounded.state_dict().keys()
    assert all(torch.equal(states[name], tensor) for name, tensor in rounded.state_dict().items())


def test_a_folder_keeps_what_belongs_to_the_model(tmp_path: Path) -> None:
    source = ROOT / "models/smollm2-drafter"  # knows a part of the vocabulary
    rounded = load_model(spec(source, quantization="int8"))
    save_rounded(rounded, str(source), tmp_path)
    for name in ("generation_config.json", "draft_vocabulary.safetensors"):
        assert (tmp_path / name).read_bytes() == (source / name).read_bytes()
    ids = torch.tensor([[5, 40_000, 9]])
    assert torch.equal(load_model(spec(tmp_path))(input_ids=ids).logits, rounded(input_ids=ids).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_activations_are_rounded_beside_integers(family: str, tmp_path: Path) -> None:
    save_model(family, make_model(make_config(family)), tmp_path / "plain")
    save_rounded(load_model(spec(tmp_path / "plain", quantization="int8")), str(tmp_path / "plain"), tmp_path)
    for rounded in (
        load_model(spec(tmp_path / "plain", quantization="int4", activations="int8")),
        load_model(spec(tmp_path, activations="int8")),
    ):
        layers = [module for module in rounded.modules() if isinstance(module, QuantizedLinear | QuantizedExperts)]
        assert all(layer.rounds_inputs for layer in layers)
        exact = rounded(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9]])).logits
        use_faster_layers(rounded)
        logits = rounded(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9]])).logits
        assert 1e-4 < (logits - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("change", [{}, {"quantization": "nf4"}, {"quantization": "int8", "device": "meta"}])
@pytest.mark.parametrize("stored", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_activations_stay_where_weights_are_no_integers(
    change: dict[str, Any], stored: dict[str, Any] | None, tmp_path: Path
) -> None:
    config = make_config("llama")
    if stored is not None:
        config.quantization_config = stored
    config.save_pretrained(tmp_path)
    reason = "needs a CPU with a C.. compiler" if "device" in change else "needs weights that are integers; add quanti"
    with pytest.raises(ConfigError, match=rf"^models\.m\.activations: int8 {reason}"):
        load_config(spec(tmp_path, activations="int8", **change))


@pytest.mark.parametrize("change", [{"adapter": "it"}, {"unpacked": True}])
def test_a_folder_of_quantised_weights_stays_as_it_is(change: dict[str, Any], tmp_path: Path) -> None:
    make_model(make_config("llama")).save_pretrained(tmp_path / "plain")
    save_rounded(load_model(spec(tmp_path / "plain", quantization="int8")), str(tmp_path / "plain"), tmp_path)
    with pytest.raises(ConfigError, match="rounded by `consort quantize`, and can't be unpacked"):
        load_config(spec(tmp_path, **change))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e6])
def test_weights_that_cannot_be_rounded_are_refused(value: float, tmp_path: Path) -> None:
    """They would have become zeros."""
    model: Any = make_model(make_config("llama"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="can't load"):
        load_model(spec(tmp_path, quantization="int4"))


def test_the_model_is_no_argument_of_conversions_in_older_versions_of_transformers() -> None:
    quantizer = IntegerQuantizer(IntegerConfig(), pre_quantized=True)
    assert quantizer.update_weight_conversions([]) == quantizer.update_weight_conversions([], object()) == []
