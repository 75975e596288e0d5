"""GGUF files are converted once, whole or not at all, and load like any other checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from decoding.errors import ConfigError
from engine.layers import linear as native_linear
from engine.loading.checkpoint import ModelSpec, check_model, load_model
from engine.loading.gguf import files as gguf_loading
from engine.loading.gguf.files import converted_folder, hub_file, settings_folder, weights_folder
from engine.loading.settings import (
    context_length,
    is_trimmed,
    load_end_tokens,
    load_sampling_defaults,
    load_tokenizer,
    read_header,
    vocabulary_size,
)
from tests.engine.loading.gguf.test_rope import llama3_factors

BUNDLED = Path(__file__).parents[4] / "models" / "drafter"
HEADS, HIDDEN, VOCABULARY = 2, 32, 2048
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"} | {
    f"model.layers.0.{layer}": f"blk.0.{short}"
    for layer, short in {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }.items()
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of converted files. There is a tokenizer beside the files to convert."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED / name, tmp_path)
    return tmp_path / "cache" / "consort" / "gguf"


def build(rope: Mapping[str, Any] | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=64,
        rope_parameters=dict(rope or {"rope_type": "default", "rope_theta": 10_000.0}),
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> LlamaForCausalLM:
    return build()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    architecture: str = "llama",
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the model's weights unquantised, without a tokenizer, and what `add` adds."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("test")
    writer.add_context_length(model.config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    for name, tensor in model.state_dict().items():
        layer, _, kind = name.rpartition(".")
        weights = tensor.numpy()
        if layer.endswith(("q_proj", "k_proj")):  # llama.cpp interleaves the halves that rotate together
            weights = weights.reshape(HEADS, 2, -1, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
        writer.add_tensor(f"{NAMES[layer]}.{kind}", np.ascontiguousarray(weights))
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def spec(path: Path, dtype: str = "float32") -> ModelSpec:
    return ModelSpec(name="m", path=str(path), dtype=dtype, device="cpu", max_length=32)


@torch.no_grad()
def test_the_weights_are_those_of_the_file(tmp_path: Path, model: LlamaForCausalLM) -> None:
    loaded = load_model(spec(write_gguf(tmp_path / "m.gguf", model)))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-6)


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4)


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4)
    writer.add_rope_scaling_orig_ctx_len(16)
    writer.add_rope_scaling_yarn_beta_fast(2)


def add_factors(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("rope_freqs.weight", llama3_factors(HIDDEN // HEADS, 10_000, factor=8, high=8, original=64))


@torch.no_grad()
@pytest.mark.parametrize(
    ("add", "rope"),
    [
        (add_linear, {"rope_type": "linear", "factor": 4.0}),
        (
            add_yarn,
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 2},
        ),
        (
            add_factors,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rotary_positions_are_scaled_as_the_file_says(
    tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], rope: Mapping[str, Any]
) -> None:
    scaled = build({"rope_theta": 10_000.0, **rope})
    loaded = load_model(spec(write_gguf(tmp_path / "m.gguf", scaled, add=add)))
    tokens = torch.randint(VOCABULARY, (1, 32), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(loaded(tokens).logits, scaled(tokens).logits, atol=1e-6)
    assert not torch.allclose(build()(tokens).logits, scaled(tokens).logits, atol=1e-3)


@pytest.mark.parametrize(
    ("instructions", "kernels", "dtype"),
    [(True, False, torch.bfloat16), (False, True, torch.bfloat16), (False, False, torch.float32)],
)
def test_the_type_is_one_that_the_processor_computes_fast(
    tmp_path: Path,
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    instructions: bool,
    kernels: bool,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: instructions)
    monkeypatch.setattr(native_linear, "has_kernel", lambda weight: kernels)
    assert load_model(spec(write_gguf(tmp_path / "m.gguf", model), "auto")).dtype == dtype


def test_memory_is_checked_in_the_type_that_is_loaded(
    tmp_path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type is chosen when a file is converted, and stays as it is then."""
    path = write_gguf(tmp_path / "m.gguf", model)
    limited = replace(spec(path, "auto"), memory_bytes=3 * sum(weight.numel() for weight in model.parameters()))
    monkeypatch.setattr(gguf_loading, "_computes_bfloat16_fast", lambda config: False)
    with pytest.raises(ConfigError, match="the weights need"):
        check_model(limited)
    monkeypatch.setattr(gguf_loading, "_computes_bfloat16_fast", lambda config: True)
    check_model(limited)
    assert load_model(limited).dtype == torch.bfloat16
    monkeypatch.setattr(gguf_loading, "_computes_bfloat16_fast", lambda config: False)
    check_model(limited)


@pytest.mark.parametrize(("config", "fast"), [(Qwen3MoeConfig(), False), (Gemma4TextConfig(), True)])
def test_models_with_experts_stay_in_float32_without_instructions_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, fast: bool
) -> None:
    """Torch computes their products, slowly. Gemma 4 can have experts, but has none by default."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert gguf_loading._computes_bfloat16_fast(config) == fast


def test_a_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", model)
    folder = weights_folder(str(path), "float32", unpacked=True)
    written_ns = (Path(folder) / "model.safetensors").stat().st_mtime_ns
    assert weights_folder(str(path), "float32", unpacked=True) == folder
    assert (Path(folder) / "model.safetensors").stat().st_mtime_ns == written_ns
    with torch.no_grad():
        model.lm_head.weight += 1
    path.unlink()
    assert weights_folder(str(write_gguf(path, model)), "float32", unpacked=True) != folder


def test_conversions_of_an_older_format_are_not_used(
    tmp_path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    folders = {settings_folder(path), weights_folder(path, "float32", unpacked=False)}
    assert converted_folder(path, "float32") is not None
    assert converted_folder(path, "float32", unpacked=True) is None
    folders.add(weights_folder(path, "float32", unpacked=True))
    assert converted_folder(path, "float32", unpacked=True) is not None
    monkeypatch.setattr(gguf_loading, "_FORMAT", gguf_loading._FORMAT + 1)
    assert converted_folder(path, "float32") is None
    assert folders.isdisjoint({settings_folder(path), weights_folder(path, "float32", unpacked=True)})


def test_copies_of_a_file_share_a_conversion(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "m.gguf", model)
    copy = tmp_path / "other environment" / "m.gguf"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert weights_folder(str(copy), "float32", unpacked=True) == weights_folder(str(path), "float32", unpacked=True)
    os.utime(path, (1, 1))
    assert weights_folder(str(path), "float32", unpacked=True) == weights_folder(str(copy), "float32", unpacked=True)


def test_another_tokenizer_beside_the_file_gives_other_settings(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    before = settings_folder(path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(path).chat_template == "{{ messages }}"
    assert settings_folder(path) != before


def test_a_cache_that_cannot_be_written_to_does_not_hide_what_is_converted(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path
) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    cache.mkdir(parents=True)
    (cache / "digests").write_text("no folder")
    assert converted_folder(path, "float32") is None
    settings_folder(path)
    weights_folder(path, "float32", unpacked=True)
    assert converted_folder(path, "float32") is not None


def test_a_tokenizer_beside_the_file_is_used(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    assert load_tokenizer(path).encode("def main():") == load_tokenizer(str(BUNDLED)).encode("def main():")
    assert load_tokenizer(path).chat_template
    assert load_sampling_defaults(path).given() == {}


@pytest.mark.parametrize(
    ("named", "expected"), [({"eos": 2}, [2]), ({"eos": 2, "eot": 5}, [2, 5]), ({"eos": 5, "eot": 5, "eom": 3}, [5, 3])]
)
def test_texts_turns_and_messages_end(
    named: dict[str, int], expected: list[int], tmp_path: Path, model: LlamaForCausalLM
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for end, token in named.items():
            getattr(writer, f"add_{end}_token_id")(token)

    assert load_end_tokens(str(write_gguf(tmp_path / "m.gguf", model, add=add))) == expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({"temp": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"penalty_repeat": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"temp": 0.0, "top_k": 20}, {"temperature": 0.0}),
    ],
)
def test_the_sampling_that_a_file_recommends_is_the_default(
    stored: dict[str, float], expected: dict[str, float], tmp_path: Path, model: LlamaForCausalLM
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in stored.items():
            getattr(writer, f"add_sampling_{key}")(value)

    assert load_sampling_defaults(str(write_gguf(tmp_path / "m.gguf", model, add=add))).given() == expected


def write_with_tokenizer(folder: Path, model: LlamaForCausalLM, split: str | None) -> str:
    """Write a file with the bundled tokenizer, beside none. split: how it says that texts are split."""
    bundled = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))["model"]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if split is not None:
            writer.add_tokenizer_pre(split)
        writer.add_token_list(sorted(bundled["vocab"], key=bundled["vocab"].__getitem__))
        writer.add_token_merges([" ".join(merge) for merge in bundled["merges"]])

    folder.mkdir()
    return str(write_gguf(folder / "m.gguf", model, add=add))


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        (None, ["a", "ĊĊ", "Ċ", "12", "Ġ34"]),
        ("gpt-2", ["a", "ĊĊ", "Ċ", "12", "Ġ34"]),
        ("smollm", ["a", "ĊĊĊ", "1", "2", "Ġ", "3", "4"]),
        ("starcoder", ["a", "ĊĊĊ", "1", "2", "Ġ", "3", "4"]),
        ("qwen2", ["a", "ĊĊĊ", "1", "2", "Ġ", "3", "4"]),
    ],
)
def test_texts_are_split_as_the_file_says(
    tmp_path: Path, model: LlamaForCausalLM, split: str | None, pieces: list[str]
) -> None:
    tokenizer = load_tokenizer(write_with_tokenizer(tmp_path / "own", model, split))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n\n12 34")
    assert [piece for piece, _ in splits] == pieces


@pytest.mark.parametrize("split", ["falcon", "deepseek-coder", "unheard-of"])
def test_a_tokenizer_that_splits_texts_in_an_unknown_way_is_refused_unless_another_lies_beside_it(
    tmp_path: Path, model: LlamaForCausalLM, split: str
) -> None:
    path = write_with_tokenizer(tmp_path / "own", model, split)
    with pytest.raises(ConfigError, match=rf"m\.gguf .*{split}.*tokenizer\.json"):
        load_tokenizer(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, tmp_path / "own")
    assert load_tokenizer(path).get_vocab() == load_tokenizer(str(BUNDLED)).get_vocab()


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path, model: LlamaForCausalLM, cache: Path) -> None:
    (tmp_path / "cache").mkdir()
    with pytest.raises(ConfigError, match=r"m\.gguf.*tokenizer"):
        load_tokenizer(str(write_gguf(tmp_path / "cache" / "m.gguf", model)))
    assert not list(cache.glob("*/settings"))


def test_an_architecture_that_cannot_be_read_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.path: .*rwkv6"):
        load_model(spec(write_gguf(tmp_path / "m.gguf", model, architecture="rwkv6")))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 100])
def test_a_broken_file_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path, content: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=r"models\.m\.path: can't load .*can't be converted"):
        load_model(spec(tmp_path / "m.gguf"))
    assert not [folder for folder in cache.glob("*/*") if folder.is_dir()]


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    complete = LlamaForCausalLM.state_dict
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            LlamaForCausalLM, "state_dict", lambda self: {k: v for k, v in complete(self).items() if "up_proj" not in k}
        )
        path = write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        load_model(spec(path))


def test_a_truncated_file_is_refused(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = write_gguf(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="can't be converted"):
        load_model(spec(path))


def test_a_full_disk_leaves_no_half_written_model(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", model)

    def fill(self: LlamaForCausalLM, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(LlamaForCausalLM, "save_pretrained", fill)
        with pytest.raises(ConfigError, match="No space left"):
            weights_folder(str(path), "float32", unpacked=True)
    assert not [folder for folder in cache.glob("*/*") if folder.is_dir()]
    assert (Path(weights_folder(str(path), "float32", unpacked=True)) / "model.safetensors").is_file()


def test_the_disk_that_is_full_is_named(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1000, 1000, 0))
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lambda self, folder: folder.joinpath("x").write_text(""))
    with pytest.raises(ConfigError, match=rf"the disk of {cache}.* is full .*XDG_CACHE_HOME"):
        weights_folder(path, "float32", unpacked=True)
    assert converted_folder(path, "float32") is None


def test_what_a_killed_process_left_is_not_taken_for_a_model(
    tmp_path: Path, model: LlamaForCausalLM, cache: Path
) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", model))
    settings_folder(path)
    unfinished = next(cache.glob("m-*")) / "float32.unfinished"
    unfinished.mkdir()
    (unfinished / "config.json").write_text("{}")
    assert converted_folder(path, "float32") is None
    assert sorted(file.name for file in Path(weights_folder(path, "float32", unpacked=True)).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert not unfinished.exists()
    assert converted_folder(path, "float32") is not None


def test_a_file_of_the_hub_is_downloaded_and_converted(
    tmp_path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, path = write_gguf(tmp_path / "tiny.gguf", model), "org/model/tiny.gguf"
    cached: list[str] = []

    def download(repository: str, name: str) -> str:
        assert (repository, name) == ("org/model", "tiny.gguf")
        cached.append(name)
        return str(local)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(local) if cached else None)
    assert converted_folder(path, "float32") is None
    assert settings_folder(path) == settings_folder(str(local))
    assert weights_folder(path, "float32", unpacked=True) == weights_folder(str(local), "float32", unpacked=True)
    assert converted_folder(path, "float32") is not None


def test_a_file_of_the_hub_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(ConfigError, match=r"'org/model/tiny\.gguf' here.*no network"):
        settings_folder("org/model/tiny.gguf")


@pytest.mark.parametrize("path", ["tiny.gguf", "a/tiny.gguf", "./a/b.gguf", "/a/b/c.gguf", "a/b/c/tiny.gguf", "a/b/c"])
def test_other_paths_are_not_of_the_hub(path: str) -> None:
    assert hub_file(path) is None


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        settings_folder(str(tmp_path / "none.gguf"))


def test_settings_are_those_that_the_models_own_code_reads(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = str(write_gguf(tmp_path / "plain.gguf", model))
    header, own = read_header(path), AutoConfig.from_pretrained(settings_folder(path))
    assert vocabulary_size(header) == vocabulary_size(own) == VOCABULARY
    assert context_length(header, None) == context_length(own, None) == 64
    assert not is_trimmed(header)
    tokenizer, expected = load_tokenizer(path), AutoTokenizer.from_pretrained(settings_folder(path))
    assert type(tokenizer) is type(expected)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.special_tokens_map == expected.special_tokens_map
    assert tokenizer.chat_template == expected.chat_template


def test_settings_are_read_without_the_models_code(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = str(write_gguf(tmp_path / "plain.gguf", model))
    settings_folder(path)  # converting needs the code
    program = (
        "import sys; from engine.loading.settings import load_tokenizer, read_header; "
        f"load_tokenizer({path!r}), read_header({path!r}); "
        "print(*sorted({'transformers.activations', 'transformers.modeling_utils'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []
