"""Pruned models compute what the full ones do without the dropped layers or tokens."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from decoding.errors import ConfigError
from tests.support.models import CONFIGS, VOCAB, tiny_model
from training.pruning import block_influence, decoder_layers, keep_layers, most_influential, trim_vocabulary

FAMILIES = sorted(CONFIGS.keys() - {"minicpm3"})  # whose layers' results are scaled by their number
TEXT = torch.tensor([[3, 9, 27, 17, 51, 25, 11, 33], [2, 4, 8, 16, 32, 60, 58, 54]])
KEPT = [40, 2, 3, 9, 27, 17, 51, 25, 11, 33, 63]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits [B, T, V]."""
    return model(input_ids=ids, use_cache=False).logits


def saved_and_loaded(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    model.save_pretrained(folder)
    result: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    loaded, info = result
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    copy: PreTrainedModel = loaded.eval()
    return copy


def test_influence_is_one_minus_the_cosine_of_a_layers_input_and_output() -> None:
    model: Any = tiny_model("llama")
    states = model.model(TEXT, output_hidden_states=True, use_cache=False).hidden_states[:-1]
    expected = [1 - cosine_similarity(before, after, dim=-1).mean().item() for before, after in pairwise(states)]
    influence = block_influence(model, [TEXT[:1], TEXT[1:]])
    assert influence[:-1] == pytest.approx(expected, abs=1e-6)


def test_a_layer_that_does_nothing_has_no_influence() -> None:
    model = tiny_model("llama")
    layer: Any = decoder_layers(model)[1]
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        weight.data.zero_()
    influence = block_influence(model, [TEXT])
    assert influence[1] == pytest.approx(0, abs=1e-6)
    assert most_influential(influence, 2) == [0, 2]
    expected = logits(model, TEXT)
    torch.testing.assert_close(logits(keep_layers(model, [0, 2]), TEXT), expected)


def test_influence_needs_text() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        block_influence(tiny_model("llama"), [])


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_are_saved_and_loaded(family: str, tmp_path: Path) -> None:
    """Skipped layers of the full model give the same logits as a pruned model."""
    full = tiny_model(family)
    layers = decoder_layers(full)
    layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    expected = logits(full, TEXT)
    del layers[1].forward
    pruned: Any = saved_and_loaded(keep_layers(full, [0, 2]), tmp_path)
    assert pruned.config.num_hidden_layers == 2
    torch.testing.assert_close(logits(pruned, TEXT), expected)
    with_cache = pruned.generate(TEXT[:1], max_new_tokens=4, do_sample=False, pad_token_id=0)
    without = pruned.generate(TEXT[:1], max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(with_cache, without)


@pytest.mark.parametrize("kept", [[], [0, 0], [2, 1], [-1], [3]])
def test_wrong_layers_are_refused(kept: list[int]) -> None:
    with pytest.raises(ConfigError, match="ascending indices of 0 to 2"):
        keep_layers(tiny_model("llama"), kept)


@pytest.mark.parametrize("count", [0, 4])
def test_a_wrong_number_of_layers_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} layers can't be kept of 3"):
        most_influential([0.1, 0.2, 0.3], count)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trimmed_vocabulary_keeps_the_logits_of_its_tokens(family: str, tied: bool, tmp_path: Path) -> None:
    full: Any = tiny_model(family, tie_word_embeddings=tied)
    rows = torch.tensor([KEPT.index(token) for token in TEXT[0].tolist()])[None]
    expected = logits(full, TEXT[:1])[..., KEPT]
    other = full.get_input_embeddings().weight.detach()
    dropped = [token for token in range(VOCAB) if token not in KEPT]
    trimmed: Any = saved_and_loaded(trim_vocabulary(full, KEPT), tmp_path)
    assert trimmed.config.get_text_config().vocab_size == len(KEPT) + 1
    assert trimmed.get_input_embeddings().num_embeddings == len(KEPT) + 1
    torch.testing.assert_close(logits(trimmed, rows)[..., :-1], expected)
    torch.testing.assert_close(trimmed.get_input_embeddings().weight[-1], other[dropped].mean(dim=0))
    same = trimmed.get_output_embeddings().weight is trimmed.get_input_embeddings().weight
    assert same == tied


def test_a_bias_of_the_output_layer_is_trimmed_too(tmp_path: Path) -> None:
    full: Any = tiny_model("phi")
    full.lm_head.bias.data.normal_(generator=torch.Generator().manual_seed(1))
    expected = logits(full, TEXT[:1])[..., KEPT]
    rows = torch.tensor([KEPT.index(token) for token in TEXT[0].tolist()])[None]
    trimmed: Any = saved_and_loaded(trim_vocabulary(full, KEPT), tmp_path)
    torch.testing.assert_close(logits(trimmed, rows)[..., :-1], expected)


def test_biases_of_projections_are_kept(tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=63, bos_token_id=None, eos_token_id=[2, 5],
    )  # fmt: skip
    torch.manual_seed(0)
    full: Any = Qwen2ForCausalLM(config).eval()
    for layer in full.model.layers:
        layer.self_attn.q_proj.bias.data.normal_()
    expected = logits(full, TEXT[:1])[..., KEPT]
    trimmed: Any = saved_and_loaded(trim_vocabulary(full, KEPT), tmp_path)
    rows = torch.tensor([KEPT.index(token) for token in TEXT[0].tolist()])[None]
    torch.testing.assert_close(logits(trimmed, rows)[..., :-1], expected)
    assert trimmed.config.eos_token_id == [KEPT.index(2)]
    assert trimmed.config.pad_token_id == KEPT.index(63)
    assert trimmed.config.bos_token_id is None


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "at least one token"),
        ([1, 2, 1], "a token twice"),
        ([1, 64], "token 64 can't be kept: the model has tokens 0 to 63"),
        ([-1], "token -1"),
    ],
)
def test_wrong_tokens_are_refused(ids: list[int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trim_vocabulary(tiny_model("llama"), ids)


def test_all_tokens_may_be_kept() -> None:
    full = tiny_model("llama")
    expected = logits(full, TEXT)
    trimmed = trim_vocabulary(full, range(VOCAB))
    assert isinstance(trimmed, LlamaForCausalLM)
    torch.testing.assert_close(logits(trimmed, TEXT)[..., :-1], expected)
