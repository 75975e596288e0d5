"""Checkpoints are loaded as configured, or refused with an error that names the field and the fix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from decoding.errors import ConfigError
from engine.kernels.quantized_weight import Quantization
from engine.layers.quantized_linear import QuantizedLinear
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.settings import SamplingDefaults, load_sampling_defaults, load_tokenizer
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import make_config, make_model
from tests.support.adapters import save_adapter
from tests.support.models import tiny_model

peft_asks_for_a_deprecated_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with 64 positions and a sliding window of 32."""
    config = MistralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(**{"name": "m", "path": str(folder), "device": "cpu", "max_length": 32, **options})


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits [T, V] of some text."""
    return model(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits[0]


def test_a_model_is_loaded_in_the_dtype_that_was_asked_for(folder: Path) -> None:
    assert load_model(spec(folder, dtype="bfloat16")).dtype == torch.bfloat16


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.max_length is 65.*64 positions"):
        load_model(spec(folder, max_length=65))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.path"):
        load_model(spec(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_checkpoint_that_lacks_weights_is_refused(folder: Path) -> None:
    """transformers would initialise them randomly."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.norm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"models\.m\.path: .* lacks 1 weights: model\.norm\.weight"):
        load_model(spec(folder))


def test_pickled_weights_are_loaded_only_on_request(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    expected = logits(load_model(spec(folder)))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"models\.m\.path: can't load"):
        load_model(spec(folder))
    torch.testing.assert_close(logits(load_model(spec(folder, safetensors_only=False))), expected)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text("raise SystemExit('this code was run')")
    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(spec(tmp_path))


@peft_asks_for_a_deprecated_name
def test_an_adapter_is_merged(tmp_path: Path) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model("mistral").save_pretrained(folder)
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(adapter))
    model = load_model(spec(folder, adapter=str(adapter)))
    assert type(model) is MistralForCausalLM
    torch.testing.assert_close(logits(model), logits(adapted), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(model), logits(load_model(spec(folder))), atol=1e-2)


@peft_asks_for_a_deprecated_name
@pytest.mark.filterwarnings("ignore:Merge lora module to:UserWarning")  # a warning about rounding, as in docs/models.md
@pytest.mark.parametrize("quantization", ["nf4", "int4", "int8"])
def test_an_adapter_is_merged_into_few_bits(quantization: Quantization, tmp_path: Path) -> None:
    """With the adapter, the quantised model is nearer to the unquantised one with it than without."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model("llama", hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(folder)
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # peft initialises from it
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(adapter))
    few_bits = spec(folder, dtype="float32", quantization=quantization)
    expected, without = logits(adapted), logits(load_model(few_bits))
    actual = logits(load_model(replace(few_bits, adapter=str(adapter))))
    assert (actual - expected).norm() < 0.5 * (without - expected).norm()


@peft_asks_for_a_deprecated_name
@pytest.mark.filterwarnings("ignore:Merge lora module to:UserWarning")
def test_a_model_with_an_adapter_is_rounded_as_one_without(tmp_path: Path) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model("llama", hidden_size=64, head_dim=16, tie_word_embeddings=True).save_pretrained(folder)
    save_adapter(adapter, AutoModelForCausalLM.from_pretrained(folder), seed=1)
    for more in ({}, {"adapter": str(adapter)}):
        model: Any = load_model(spec(folder, dtype="bfloat16", quantization="int4", **more))
        assert model.dtype == torch.bfloat16
        assert isinstance(model.lm_head, QuantizedLinear)
        assert model.lm_head.codes is model.model.embed_tokens.codes


def test_a_model_may_have_no_parameters_but_integers(tmp_path: Path) -> None:
    make_model(make_config("olmo")).save_pretrained(tmp_path)
    rounded = load_model(spec(tmp_path, dtype="bfloat16", quantization="int8"))
    assert (rounded.dtype, rounded.device) == (torch.bfloat16, torch.device("cpu"))
    rounded.save_pretrained(tmp_path / "rounded")
    assert load_model(spec(tmp_path / "rounded")).dtype == torch.bfloat16


@peft_asks_for_a_deprecated_name
@pytest.mark.filterwarnings("ignore:.*tie:UserWarning")
@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head", "q_proj"]])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapter_of_shared_weights_is_refused(targets: list[str], is_tied: bool, tmp_path: Path) -> None:
    """Merged into one layer, it would act on the other, too."""
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    tiny_model("llama", tie_word_embeddings=is_tied).save_pretrained(folder)
    base: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    adapted.save_pretrained(str(adapter), save_embedding_layers=False)
    if is_tied:
        with pytest.raises(ConfigError, match=r"models\.m\.adapter: .* shares its weights with another layer"):
            load_model(spec(folder, adapter=str(adapter)))
    else:
        torch.testing.assert_close(
            logits(load_model(spec(folder, adapter=str(adapter)))), logits(adapted), atol=1e-5, rtol=1e-5
        )


@peft_asks_for_a_deprecated_name
def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj"]))
    other.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match=r"models\.m\.adapter: can't merge"):
        load_model(spec(folder, adapter=str(tmp_path / "adapter")))
    with pytest.raises(ConfigError, match=r"models\.m\.adapter: can't merge"):
        load_model(spec(folder, adapter=str(tmp_path / "nothing")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_layers_can_be_spread_over_gpus_only_where_there_are_some(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.device is 'balanced', but there is no GPU"):
        load_model(spec(folder, device="balanced"))


def test_a_runner_works_through_the_hooks_that_move_tensors_between_devices() -> None:
    """With several GPUs, accelerate moves each layer's inputs, row indices included, to its device."""
    model = tiny_model("llama-gqa")
    expected = logits(model)
    devices = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    devices |= {f"model.layers.{index}": "cpu" for index in range(3)}
    dispatch_model(model, device_map=devices, main_device="cpu", force_hooks=True)
    runner = Runner(model, slots=2, max_length=16, max_query=8)
    actual = [runner.logits([RowInput(1, start, tokens)]) for start, tokens in ((0, [3, 1, 4]), (3, [1, 5, 9, 2, 6]))]
    torch.testing.assert_close(torch.cat(actual), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "do_sample": True}, {"temperature": 0.6, "top_k": 20}),
        ({"do_sample": False}, {"temperature": 0.0}),
        ({"max_new_tokens": 40, "repetition_penalty": 1.1}, {"max_tokens": 40, "repetition_penalty": 1.1}),
        ({"eos_token_id": 3}, {}),
    ],
)
def test_sampling_defaults_are_what_the_checkpoint_says(
    saved: dict[str, float], expected: dict[str, float], tmp_path: Path
) -> None:
    GenerationConfig(**saved).save_pretrained(tmp_path)
    assert load_sampling_defaults(str(tmp_path)).given() == expected


def test_a_checkpoint_may_say_nothing_of_sampling(tmp_path: Path) -> None:
    assert load_sampling_defaults(str(tmp_path)) == SamplingDefaults()
