"""Configurations of GGUF files have the positions of the model that the file was made from, or are refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from decoding.errors import ConfigError
from engine.loading.gguf.header import Header
from engine.loading.gguf.weights import make_config

Add = Callable[[gguf.GGUFWriter], None]


def llama3_factors(
    head_dim: int, base: float, *, factor: float, high: float = 4, original: int = 8192
) -> NDArray[np.float32]:
    """Return the factors [head_dim / 2] that llama.cpp's converter writes for Llama 3.1 and later."""
    factors = []
    for dimension in range(0, head_dim, 2):
        wavelength = 2 * math.pi * base ** (dimension / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(factor)
        else:
            smooth = (original / wavelength - 1) / (high - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def read(
    folder: Path,
    architecture: str,
    *adds: Add,
    layers: int = 2,
    hidden: int = 128,
    heads: int = 2,
    head_dim: int = 64,
    base: float = 500_000,
) -> PreTrainedConfig:
    """Return the configuration of a file without weights but those that `adds` add."""
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 1), dtype=np.float32))
    writer.add_context_length(131_072)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(64)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(100)
    for add in adds:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return make_config(Header(folder / "m.gguf"))


def tensor(name: str, values: Any) -> Add:
    return lambda writer: writer.add_tensor(name, np.array(values, dtype=np.float32))


def scaling(kind: str, factor: float | None = None) -> Add:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        if factor is not None:
            writer.add_rope_scaling_factor(factor)

    return add


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize(
    ("head_dim", "factor", "high", "original"), [(64, 32, 4, 8192), (128, 8, 4, 8192), (128, 16, 8, 4096)]
)
def test_factors_give_the_parameters_of_llama_3(
    folder: Path, head_dim: int, factor: float, high: float, original: int
) -> None:
    factors = llama3_factors(head_dim, 500_000, factor=factor, high=high, original=original)
    config = read(folder, "llama", tensor("rope_freqs.weight", factors), head_dim=head_dim)
    assert config.rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500_000,
        "factor": factor,
        "low_freq_factor": 1,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


@pytest.mark.parametrize(
    "adds",
    [
        [scaling("none", 8)],
        [scaling("linear", 1)],
        [lambda writer: writer.add_float32("llama.rope.scale_linear", 1)],
        [tensor("rope_freqs.weight", np.ones(32))],
    ],
)
def test_scaling_without_effect_is_none(folder: Path, adds: list[Add]) -> None:
    assert read(folder, "llama", *adds).rope_parameters["rope_type"] == "default"


def test_linear_scaling_has_an_old_name(folder: Path) -> None:
    config = read(folder, "llama", lambda writer: writer.add_float32("llama.rope.scale_linear", 4))
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4, "rope_theta": 500_000}


def test_only_full_attention_of_gemma_3_is_scaled(folder: Path) -> None:
    config = read(folder, "gemma3", scaling("linear", 8), base=1_000_000)
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 1_000_000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
    }


def test_the_factors_of_gemma_4_are_those_of_its_positions(folder: Path) -> None:
    factors = [1.0] * 64 + [1e30] * 192
    config = read(folder, "gemma4", tensor("rope_freqs.weight", factors), layers=6, head_dim=512, base=1_000_000)
    assert config.rope_parameters["full_attention"]["rope_type"] == "proportional"
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        read(folder, "gemma4", tensor("rope_freqs.weight", [*factors[1:], 1e30]), layers=6, head_dim=512)


def test_the_base_is_that_of_the_file(folder: Path) -> None:
    assert read(folder, "starcoder2", base=999_999).rope_parameters["rope_theta"] == 999_999


@pytest.mark.parametrize(
    ("adds", "named"),
    [
        ([tensor("rope_factors_long.weight", np.ones(16)), scaling("longrope")], "rope_factors_long.weight"),
        ([scaling("longrope", 4)], "rope.scaling.type is longrope"),
        ([scaling("linear", 4), lambda writer: writer.add_rope_scaling_attn_factors(1.2)], "rope.scaling.attn_factor"),
        ([scaling("yarn", 4), lambda writer: writer.add_rope_scaling_yarn_log_mul(0.1)], "yarn_log_multiplier"),
        ([tensor("rope_freqs.weight", np.linspace(1, 8, 32))], "rope_freqs.weight"),
        ([tensor("rope_freqs.weight", np.full(32, 8))], "rope_freqs.weight"),
        ([tensor("rope_freqs.weight", np.full(32, 0.5))], "rope_freqs.weight"),
        ([tensor("rope_freqs.weight", llama3_factors(32, 500_000, factor=8))], "rope_freqs.weight"),
        (
            [tensor("rope_freqs.weight", llama3_factors(64, 500_000, factor=8)), scaling("linear", 4)],
            "rope_freqs.weight",
        ),
    ],
)
def test_other_scaling_is_refused(folder: Path, adds: list[Add], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}.*; use a safetensors checkpoint"):
        read(folder, "llama", *adds)


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "heads", "head_dim", "expected"),
    [
        ("gemma2", 42, 3584, 16, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
    ],
)
def test_attention_of_gemma_is_scaled_by_the_models_size(
    folder: Path, architecture: str, layers: int, hidden: int, heads: int, head_dim: int, expected: int
) -> None:
    """The sizes are those of Gemma 2 9B and 27B, and of Gemma 3 12B and 27B."""
    config = read(folder, architecture, layers=layers, hidden=hidden, heads=heads, head_dim=head_dim)
    assert config.query_pre_attn_scalar == expected
