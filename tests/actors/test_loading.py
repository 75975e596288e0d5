"""Models that the runner can't run right are refused with the field and the fix."""

from pathlib import Path

import pytest
from transformers import MistralConfig, MistralForCausalLM

from actors.loading import ModelSpec, load_model, load_tokenizer
from decoding.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with 64 positions, of which it attends to the last 32."""
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


def test_a_model_is_loaded_in_the_dtype_that_was_asked_for(folder: Path) -> None:
    model = load_model(ModelSpec(name="m", path=str(folder), dtype="bfloat16", device="cpu", max_length=32))
    assert str(model.dtype) == "torch.bfloat16"


def test_more_positions_than_the_model_has_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.max_length is 65.*64 positions"):
        load_model(ModelSpec(name="m", path=str(folder), device="cpu", max_length=65))


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.path"):
        load_model(ModelSpec(name="m", path=str(tmp_path), device="cpu"))
    with pytest.raises(ConfigError, match="tokenizer"):
        load_tokenizer(str(tmp_path))
