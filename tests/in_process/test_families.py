"""Model families from checkpoint to logits: each gives the logits of its own plain forward.

`test_runner.py` does the same without loading and without faster layers.
"""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
)

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.runners import load_runner
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, let_llama_count_positions, tiny_model

TOLERANCE = 1e-4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def spec(folder: Path, **options: Any) -> ModelSpec:
    return ModelSpec(
        **{
            "name": "m",
            "path": str(folder),
            "device": "cpu",
            "slots": 3,
            "max_length": 64,
            "prefill_chunk": 16,
            **options,
        }
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)


class Checked:
    """A loaded runner and a plain model of the same checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner: Runner = load_runner(spec(folder))
        self.plain: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder)

    @torch.no_grad()
    def expected(self, text: list[int]) -> Tensor:
        """Return the logits [T, V] without a cache."""
        return self.plain(torch.tensor([text]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=CONFIGS)
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checked:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(folder)
    return Checked(folder)


def random_text(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(VOCAB) for _ in range(count)]


def test_chunks_of_a_prompt_beside_single_tokens(checked: Checked) -> None:
    long, short = random_text(50), random_text(14)
    checked.runner.logits([RowInput(0, 0, short[:10])])
    logits = []
    for step in range(4):
        chunk, single = long[16 * step : 16 * step + 16], short[10 + step : 11 + step]
        rows = checked.runner.logits([RowInput(2, 16 * step, chunk), RowInput(0, 10 + step, single)])
        logits.append(rows[:-1])
        assert_close(rows[-1], checked.expected(short[: 11 + step])[-1])
    assert_close(torch.cat(logits), checked.expected(long))


def test_trees_of_drafts_and_what_follows_the_path_that_is_kept(checked: Checked) -> None:
    """Two trees of different sizes in one call, each with siblings; then the deepest path becomes text."""
    texts = [random_text(20), random_text(7)]
    for slot, text in enumerate(texts):
        checked.runner.logits([RowInput(slot, 0, text)])
    parents = [[-1, -1, 0, 2, 2], [-1, 0, 0]]  # of each node, the index of the node above it
    drafts, rows, paths = [random_text(5), random_text(3)], [], []
    for slot, text in enumerate(texts):
        ancestors: list[list[int]] = []
        for index, parent in enumerate(parents[slot]):
            ancestors.append([*(ancestors[parent] if parent >= 0 else []), index])
        paths.append(ancestors)
        columns = [[len(text) + index for index in path] for path in ancestors]
        rows.append(RowInput(slot, len(text), drafts[slot], trunk=len(text), paths=columns))
    logits = checked.runner.logits(rows).split([5, 3])
    for slot, text in enumerate(texts):
        for index, path in enumerate(paths[slot]):
            assert_close(logits[slot][index], checked.expected(text + [drafts[slot][node] for node in path])[-1])
    kept = paths[0][-1]
    checked.runner.compact(0, 20, [20 + index for index in kept])
    text = [*texts[0], *(drafts[0][index] for index in kept), 5, 6]
    assert_close(checked.runner.logits([RowInput(0, len(text) - 2, [5, 6])]), checked.expected(text)[-2:])


def test_small_batches_do_not_run_the_models_forward(checked: Checked) -> None:
    """Large batches do run it, where its overhead is negligible."""
    text = random_text(40)
    with mock.patch.object(checked.runner.model, "forward", side_effect=AssertionError):
        checked.runner.logits([RowInput(0, 0, text), RowInput(1, 0, text[:7])])
        logits = checked.runner.logits([RowInput(0, 40, [5]), RowInput(1, 7, [8])])
    assert_close(logits, torch.stack([checked.expected([*text, 5])[-1], checked.expected([*text[:7], 8])[-1]]))
    rows = [RowInput(slot, 0, random_text(45)) for slot in range(3)]
    with mock.patch.dict(checked.runner._forward._traced, {False: mock.Mock(side_effect=AssertionError)}):
        checked.runner.logits(rows)


def test_a_model_that_branches_on_the_length_is_not_traced(tmp_path: Path) -> None:
    """Dynamic rotary positions depend on the longest text so far."""
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    runner = load_runner(spec(tmp_path))
    with mock.patch.object(runner.model, "forward", wraps=runner.model.forward) as forward:
        runner.logits([RowInput(0, 0, random_text(20))])
    forward.assert_called_once()


@pytest.mark.parametrize("kind", ["by the number of tokens", "by positions that no operator reads"])
def test_a_model_with_hidden_branches_is_not_traced(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace would be right for some batches and wrong for others."""
    tiny_model("llama").save_pretrained(tmp_path)
    forward = LlamaForCausalLM.forward

    def deciding(self: LlamaForCausalLM, *, position_ids: Tensor | None = None, **options: Any) -> Any:
        output = forward(self, position_ids=position_ids, **options)
        if position_ids is not None:
            many = position_ids.numel() > 32 if kind == "by the number of tokens" else position_ids.tolist()[0][0] > 2
            output.logits = output.logits * (1.00001 if many else 1.0)
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", deciding)
    runner = load_runner(spec(tmp_path))
    with mock.patch.object(runner.model, "forward", wraps=runner.model.forward) as called:
        runner.logits([RowInput(0, 0, random_text(20))])
    called.assert_called_once()


def test_slots_of_fewer_bits(checked: Checked) -> None:
    coarse = load_runner(spec(checked.folder, kv_dtype="bfloat16"))
    text = random_text(30)
    logits = torch.cat([coarse.logits([RowInput(1, start, text[start : start + 15])]) for start in (0, 15)])
    assert {store.dtype for stores in coarse.cache.layers.values() for store in stores} == {torch.bfloat16}
    expected = checked.expected(text)
    assert (logits - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
            "ALiBi",
        ),
        (
            Phi3Config(**SHAPE, original_max_position_embeddings=60, rope_parameters=LONG),
            r"\(longrope\) change with the length of the text beyond 60 tokens; lower max_length from 64 to 60",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else "",
)
def test_what_a_runner_cannot_serve_is_refused_before_it_is_loaded(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"models\.m\.path: .* can't be served: .*{reason}"):
        load_model(spec(tmp_path))


def test_positions_that_depend_on_length_are_served_up_to_the_length_where_they_do(tmp_path: Path) -> None:
    config = Phi3Config(**SHAPE, original_max_position_embeddings=64, rope_parameters=LONG)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    checked = Checked(tmp_path)
    text = random_text(50)
    assert_close(checked.runner.logits([RowInput(1, 0, text)]), checked.expected(text))


def test_a_model_that_counts_positions_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration does not show it."""
    tiny_model("llama").save_pretrained(tmp_path)
    let_llama_count_positions(monkeypatch)
    with pytest.raises(ConfigError, match=r"models\.m\.path: .* can't be served: LlamaForCausalLM gives other logits"):
        load_runner(spec(tmp_path))


def test_a_model_whose_forward_fails_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(tmp_path)

    def failing(*arguments: object, **options: Any) -> None:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(LlamaForCausalLM, "forward", failing)
    with pytest.raises(ConfigError, match="does not run over KV slots: out of ideas"):
        load_runner(spec(tmp_path))
