"""MTP layers of a target's own checkpoint: their logits are those of the formula, by whatever names a family has."""

import logging
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decoding.errors import ConfigError
from decoding.sampling.params import SamplingParams
from engine.heads.proposer import DraftStart, Reading
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.runners import load_with_heads
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.families.configurations import VOCAB, make_config, make_model
from tests.support.models import tiny_model
from tests.support.mtp import FAMILIES, add_shard, add_tensors, make_mtp

TEXT = [(7 * position + 3) % VOCAB for position in range(21)]
GREEDY = SamplingParams(max_tokens=1, temperature=0)


def load(folder: Path, **options: Any) -> tuple[Runner, Any]:
    sizes: dict[str, Any] = {"slots": 4, "max_length": 96, "prefill_chunk": 32, "threads": 1}
    spec = ModelSpec(name="m", path=str(folder), device="cpu", dtype="float32", **sizes)
    heads = HeadsSpec(name="endpoints.e.heads", path=str(folder), kind="mtp", min_acceptance=0, **options)
    runner, _, proposer = load_with_heads(spec, heads)
    return runner, proposer


def draft(runner: Runner, heads: Any, text: list[int], *, cuts: tuple[int, ...], length: int = 4) -> list[int]:
    """Let the target read all of a text but its last token in chunks, beside another text, and the head draft."""
    bounds = [0, *cuts, len(text) - 1]
    for start, end in pairwise(bounds):
        runner.logits([RowInput(0, start, TEXT[start:end][::-1]), RowInput(2, start, text[start:end])])
        count = end - start
        rows = list(range(count, 2 * count))
        heads.read([Reading(2, start, text[start + 1 : end + 1], rows, 2 * count - 1, text[start])], runner.hidden)
    (choices,) = heads.propose([DraftStart(2, len(text), GREEDY)], length, 4)
    return [choice.tokens[0] for choice in choices]


@pytest.mark.parametrize("name", FAMILIES)
def test_its_logits_are_those_of_the_formula(name: str, tmp_path: Path) -> None:
    """A chain has the right positions, too: each further token follows the layer's own output."""
    reference = make_mtp(name, tmp_path, save=add_shard if name == "glm4_moe" else None)
    runner, heads = load(tmp_path)
    for cuts in ((), (7, 9)):
        drafted = draft(runner, heads, TEXT, cuts=cuts)
        expected = reference.logits(TEXT, drafted[:-1])
        torch.testing.assert_close(heads._head.logits(heads._states[2]), expected[0], atol=1e-4, rtol=1e-4)
        assert drafted == expected.argmax(dim=-1).tolist()
        runner.cache.clear_all()


def test_its_acceptance_is_logged_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_mtp("mimo", tmp_path, right=True)
    with caplog.at_level(logging.INFO, "engine.heads.loader"):
        load(tmp_path)
    assert "endpoints.e.heads: 100 % of the first draft tokens are the target's own" in caplog.text


def test_a_multimodal_checkpoint_has_it_beside_the_text_model(tmp_path: Path) -> None:
    whole: Any = make_model(make_config("qwen3_5"))
    whole.save_pretrained(tmp_path)
    text_model = SimpleNamespace(model=whole.model.language_model, lm_head=whole.lm_head)
    reference = make_mtp("qwen3_5", tmp_path, target=text_model)
    drafted = draft(*load(tmp_path), TEXT, cuts=())
    assert drafted == reference.logits(TEXT, drafted[:-1]).argmax(dim=-1).tolist()


@pytest.mark.parametrize("differs", [False, True])
def test_embedding_and_output_layer_are_the_targets_unless_the_file_has_others(tmp_path: Path, differs: bool) -> None:
    reference = make_mtp("deepseek_v3", tmp_path)
    target: Any = reference.target
    embedding, output = (layer.weight.data.clone() for layer in (target.model.embed_tokens, target.lm_head))
    if differs:
        embedding, output = 2 * embedding.flip(0), output.flip(0)
    layer = "model.layers.4"
    add_tensors({f"{layer}.embed_tokens.weight": embedding, f"{layer}.shared_head.head.weight": output}, tmp_path)
    runner, heads = load(tmp_path)
    assert (heads._head.embed_tokens is not None) == (heads._head.output is not None) == differs
    drafted = draft(runner, heads, TEXT, cuts=(5,))
    if differs:
        reference.embedding, reference.output = torch.nn.Embedding.from_pretrained(embedding), lambda x: x @ output.T
    assert drafted == reference.logits(TEXT, drafted[:-1]).argmax(dim=-1).tolist()


def test_weights_in_blocks_of_fp8_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    """As DeepSeek-V3's files have them: one scale for 128 times 128 weights, and for what is left at the ends."""
    meant: dict[str, Tensor] = {}

    def save(tensors: dict[str, Tensor], folder: Path) -> None:
        stored = {}
        for name, tensor in tensors.items():
            if not name.endswith("_proj.weight") or "input" in name:
                stored[name] = tensor
                continue
            rows, columns = (torch.arange(size) // 128 for size in tensor.shape)
            scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) / 100 + 0.005
            wide = scale[rows][:, columns]
            stored[name] = (tensor / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name.removeprefix("model.mtp_layers.0.")] = stored[name].float() * wide
        add_tensors(stored, folder)

    reference = make_mtp("mimo", tmp_path, save=save, intermediate_size=200)
    assert len(meant) == 7
    reference.layer.load_state_dict(meant, strict=False)
    runner, heads = load(tmp_path)
    drafted = draft(runner, heads, TEXT, cuts=())
    expected = reference.logits(TEXT, drafted[:-1])
    torch.testing.assert_close(heads._head.logits(heads._states[2]), expected[0], atol=1e-4, rtol=1e-4)


def renamed(tensors: dict[str, Tensor], pattern: str, name: str) -> dict[str, Tensor]:
    return {re.sub(pattern, name, key): tensor for key, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: {}, "has no MTP layers under known names"),
        (
            lambda tensors: renamed(tensors, "k_proj.weight", "k_proj.weight_packed"),
            r"quantised \(mtp.*k_proj.weight_packed\)",
        ),
        (lambda tensors: renamed(tensors, "k_proj", "j_proj"), "lack self_attn.k_proj.weight"),
        (lambda tensors: tensors | {"mtp.layers.0.mlp.bias": torch.ones(1)}, "should not have mlp.bias"),
        (lambda tensors: tensors | {"mtp.fc.weight": torch.ones(3, 4)}, r"can't be loaded: (?s:.)*\[3, 4\]"),
    ],
)
def test_a_wrong_checkpoint_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], problem: str
) -> None:
    make_mtp("qwen3_5", tmp_path, save=lambda tensors, folder: add_tensors(change(tensors), folder))
    with pytest.raises(ConfigError, match=f"endpoints.e.heads: .*{problem}"):
        load(tmp_path)


def test_keys_of_other_heads_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    for key, value in {"layers": [1], "tree": [[0]]}.items():
        with pytest.raises(ConfigError, match=rf"endpoints.e.heads.{key}: an MTP layer drafts a chain"):
            load(tmp_path, **{key: value})
    assert not any("mtp" in name for name in load_file(tmp_path / "model.safetensors"))
