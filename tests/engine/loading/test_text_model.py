"""Text models of multimodal checkpoints: their logits are those of the class that the checkpoint names."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, check_model, load_model
from engine.loading.settings import load_tokenizer, vocabulary_size
from engine.loading.supported import try_out
from engine.loading.text_model import other_parts
from tests.families.configurations import VOCAB, make_config, make_model, save_model

FAMILIES = [
    *("gemma3", "gemma3n", "gemma4", "mistral3", "mistral3 (ministral3)", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("glm4v_moe", "qwen3_5", "llama4", "llava", "smolvlm"),
]


def make_multimodal(name: str, folder: Path) -> PreTrainedModel:
    """Save a checkpoint. Return the class that it names; the text model of Gemma 3n, whose tower needs a package."""
    model = make_model(make_config(name))
    save_model(name, model, folder)
    return model


def spec(folder: Path) -> ModelSpec:
    return ModelSpec(name="m", path=str(folder), dtype="float32", device="cpu", max_length=64)


def assert_same_logits(actual: PreTrainedModel, expected: PreTrainedModel) -> None:
    tokens = torch.arange(3, 27)[None]
    with torch.inference_mode():
        given, wanted = (model(input_ids=tokens, use_cache=False).logits for model in (actual, expected))
    torch.testing.assert_close(given, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_its_logits_are_those_of_the_whole(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make_multimodal(name, tmp_path)
    with caplog.at_level(logging.WARNING, "transformers"):
        model = load_model(spec(tmp_path))
    assert_same_logits(model, whole)
    try_out(model)
    assert not any("tower" in weight or "visual" in weight for weight, _ in model.named_parameters())
    assert "vision" in other_parts(AutoConfig.from_pretrained(tmp_path))
    assert "UNEXPECTED" not in caplog.text
    assert vocabulary_size(AutoConfig.from_pretrained(tmp_path)) == VOCAB


def test_settings_may_stand_beside_the_towers(tmp_path: Path) -> None:
    """The Hub's Qwen2.5-VL has them so."""
    whole, file = make_multimodal("qwen2_5_vl", tmp_path), tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = {key: value for key, value in config.pop("text_config").items() if key != "model_type"}
    file.write_text(json.dumps(text | config))
    assert_same_logits(load_model(spec(tmp_path)), whole)


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    make_multimodal("mistral3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lacks 9 weights: model\.layers\.4"):
        load_model(spec(tmp_path))


def test_a_text_model_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kosmos-2"}))
    with pytest.raises(ConfigError, match="no causal language model for configurations of type 'kosmos_2_text_model'"):
        check_model(spec(tmp_path))


def test_the_chat_template_may_be_the_processors(tmp_path: Path) -> None:
    files = Path(__file__).parents[3] / "models" / "target"
    for file in files.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"
