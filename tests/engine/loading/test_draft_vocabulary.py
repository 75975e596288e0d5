"""Drafters with a trimmed vocabulary take and give the ids of their target."""

import math
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from decoding.errors import ConfigError
from engine.layers.faster_layers import use_faster_layers
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.draft_vocabulary import FILE, save_draft_vocabulary
from engine.loading.memory_budget import weights_on_devices
from engine.loading.runners import load_runner
from engine.loading.settings import vocabulary_size
from engine.loading.supported import try_out
from engine.loading.tensor_parallel import load_sharded_runner
from engine.loading.token_mappings import load_draft_mappings
from engine.model.cuda_graphs import CudaGraphs
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from tests.support.models import CONFIGS, VOCAB, tiny_model
from tests.support.trimmed import masked, save_trimmed
from training.pruning import trim_vocabulary

MODELS = Path(__file__).parents[3] / "models"
KEPT = [40, 2, 3, 9, 27, 17, 51, 25, 11, 33, 63]
TEXT = [3, 9, 27, 1, 17, 50, 25, 11]


def spec(folder: Path, **options: object) -> ModelSpec:
    usual = {"name": "d", "path": str(folder), "device": "cpu", "slots": 2, "max_length": 64, "threads": 1}
    return ModelSpec(**(usual | options))  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_trimmed(tiny_model("llama-gqa"), KEPT, tmp_path)
    return tmp_path


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_logits_are_those_of_the_full_model_with_the_others_masked(family: str, tied: bool, tmp_path: Path) -> None:
    save_trimmed(tiny_model(family, tie_word_embeddings=tied), KEPT, tmp_path)
    loaded = load_model(spec(tmp_path))
    expected = logits(masked(tiny_model(family, tie_word_embeddings=tied), KEPT))
    torch.testing.assert_close(logits(loaded), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runner_gives_them_too(folder: Path, dtype: str) -> None:
    """With faster layers, over slots, in a few large and small steps, traced."""
    model = load_model(spec(folder, dtype=dtype))
    expected = logits(model).float()
    runner = load_runner(spec(folder, dtype=dtype))
    actual = torch.cat([runner.logits([RowInput(0, 0, TEXT[:6])]), runner.logits([RowInput(0, 6, TEXT[6:])])])
    assert runner.vocab_size == VOCAB
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=0.05 if dtype == "bfloat16" else 1e-4, rtol=1e-3)
    dropped = [token for token in range(VOCAB) if token not in KEPT]
    assert bool((actual[:, dropped] == -math.inf).all())
    assert bool(actual[:, KEPT].isfinite().all())


def test_small_steps_run_without_the_models_python(folder: Path) -> None:
    runner = load_runner(spec(folder))
    assert runner._forward.is_traced
    expected = runner.logits([RowInput(0, 0, TEXT)])
    runner.model.forward = None
    assert torch.equal(runner.logits([RowInput(1, 0, TEXT)]), expected)


def test_graphs_give_them_too(folder: Path) -> None:
    model = load_model(spec(folder))
    expected = logits(model)
    runner = Runner(model, slots=2, max_length=64, max_query=16)
    runner.use_graphs(capture=lambda run: run)
    assert isinstance(runner._graphs, CudaGraphs)
    for start in range(0, 8, 4):
        actual = runner.logits([RowInput(0, start, TEXT[start : start + 4])])
        torch.testing.assert_close(actual, expected[start : start + 4], atol=1e-4, rtol=1e-4)


def test_quantised_too(tmp_path: Path) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 64}
    save_trimmed(tiny_model("llama-gqa", **wide), KEPT, tmp_path)
    model = load_model(spec(tmp_path, quantization="int8"))
    actual = logits(model).float()
    expected = logits(masked(tiny_model("llama-gqa", **wide), KEPT))
    torch.testing.assert_close(actual[:, KEPT], expected[:, KEPT], atol=0.2, rtol=0.1)


def test_its_memory_is_that_of_few_tokens(folder: Path) -> None:
    full, loaded = tiny_model("llama-gqa"), load_model(spec(folder))
    saved = 2 * (VOCAB - len(KEPT) - 1) * 32 * 4  # embedding and output layer, float32
    table = (VOCAB + len(KEPT)) * 8
    device = torch.device("cpu")
    assert weights_on_devices(loaded)[device] == weights_on_devices(full)[device] - saved + table


def test_it_is_tried_out_and_made_faster_like_any_model(folder: Path) -> None:
    model = load_model(spec(folder))
    use_faster_layers(model)
    try_out(model)


def test_its_tokens_are_the_targets(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    tokenizer.save_pretrained(tmp_path)
    save_trimmed(tiny_model("llama-gqa", vocab_size=2048), KEPT, tmp_path)
    assert vocabulary_size(AutoConfig.from_pretrained(tmp_path)) == 2048
    assert not load_draft_mappings(spec(tmp_path), [ModelSpec(name="target", path=str(MODELS / "target"))])


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / FILE).unlink()
    with pytest.raises(ConfigError, match=rf"models\.d\.path: .* there is no {FILE}"):
        load_model(spec(folder))


def test_a_broken_file_is_named(folder: Path) -> None:
    (folder / FILE).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=rf"models\.d\.path: .* {FILE} can't be read"):
        load_model(spec(folder))


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [
        ([*KEPT[:-1], VOCAB], f"token {VOCAB} is none of the target's {VOCAB}"),
        ([*KEPT[:-1], -1], "token -1 is none"),
        ([*KEPT[:-1], KEPT[0]], f"token {KEPT[0]} is there twice"),
        (KEPT[:-1], r"is torch.int64 \[10\], but a model of 12 rows needs torch.int64 \[11\]"),
    ],
)
def test_wrong_ids_are_named(folder: Path, token_ids: list[int], reason: str) -> None:
    save_draft_vocabulary(token_ids, folder)
    with pytest.raises(ConfigError, match=rf"models\.d\.path: .*{reason}"):
        load_model(spec(folder))


def test_a_file_without_the_tensor_is_named(folder: Path) -> None:
    save_file({"ids": torch.tensor(KEPT)}, folder / FILE)
    with pytest.raises(ConfigError, match="needs a tensor 'token_ids'"):
        load_model(spec(folder))


def test_it_is_trimmed_once_only(folder: Path) -> None:
    with pytest.raises(ConfigError, match="trimmed vocabulary already"):
        trim_vocabulary(load_model(spec(folder)), [1, 2])


def test_it_is_not_split_over_devices(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.d\.tensor_parallel: .* runs on one device"):
        load_sharded_runner(spec(folder), mock.Mock())
