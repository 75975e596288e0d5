"""A finetuned model knows its data, an interrupted run ends like any other, and the result is loaded for serving."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from decoding.errors import ConfigError
from engine.loading.checkpoint import ModelSpec, load_model
from engine.loading.settings import load_tokenizer
from tests.support.models import tiny_model
from tests.support.trimmed import save_trimmed
from training import finetune as module
from training.examples import Example
from training.finetune import FinetuneOptions, finetune

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
MODEL = "models/drafter"
TEXT = "The quick brown fox jumps over the lazy dog and runs away."
EXAMPLES = [Example(line, text=TEXT) for line in range(1, 5)]


def options(folder: Path, **changes: object) -> FinetuneOptions:
    usual = FinetuneOptions(
        model=MODEL, output=folder / "out", work=folder / "work", rank=8, epochs=12, learning_rate=1e-2, batch_size=2,
        max_length=64, save_steps=4, threads=1, device="cpu",
    )  # fmt: skip
    return replace(usual, **changes)  # type: ignore[arg-type]


def spec(path: Path | str, **more: str) -> ModelSpec:
    return ModelSpec(name="m", path=str(path), dtype="float32", device="cpu", threads=1, **more)  # type: ignore[arg-type]


@torch.no_grad()
def loss(model: PreTrainedModel) -> float:
    ids = torch.tensor([load_tokenizer(MODEL)(TEXT)["input_ids"]])
    return float(model(input_ids=ids, labels=ids).loss)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    finetune(options(folder), EXAMPLES, lambda line: None)
    return folder / "out"


def test_a_text_is_learned_and_the_model_is_loaded(tuned: Path) -> None:
    assert loss(load_model(spec(tuned))) < 0.3 * loss(load_model(spec(MODEL)))
    assert load_tokenizer(str(tuned)).get_vocab() == load_tokenizer(MODEL).get_vocab()
    assert not (tuned.parent / "work").exists()
    assert load_file(tuned / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16


def test_an_interrupted_run_ends_like_any_other(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after its second checkpoint and while it writes the third."""
    lines: list[str] = []

    class Killed(BaseException):
        pass

    def kill(line: str) -> None:
        lines.append(line)
        if line.startswith("step 10 "):
            raise Killed

    with pytest.raises(Killed):
        finetune(options(tmp_path), EXAMPLES, kill)
    assert not (tmp_path / "out").exists()
    half = tmp_path / "work" / "checkpoint-12"
    shutil.copytree(tmp_path / "work" / "checkpoint-8", half)
    (half / "trainer_state.json").write_text("{", encoding="utf-8")
    finetune(options(tmp_path), EXAMPLES, lines.append)
    assert "going on after step 8" in lines
    expected, actual = (load_file(folder / "model.safetensors") for folder in (tuned, tmp_path / "out"))
    assert all(torch.equal(weights, expected[name]) for name, weights in actual.items())


def test_the_adapter_alone_is_served_with_the_model(tuned: Path, tmp_path: Path) -> None:
    finetune(options(tmp_path, keep_adapter=True), EXAMPLES, lambda line: None)
    assert not (tmp_path / "out" / "model.safetensors").exists()
    adapted = load_model(spec(MODEL, adapter=str(tmp_path / "out")))
    assert loss(adapted) == pytest.approx(loss(load_model(spec(tuned))), abs=0.02)  # the other is in bfloat16


def test_checkpoints_of_other_settings_are_refused(tmp_path: Path) -> None:
    module._check_run(options(tmp_path, rank=2), [])
    module._check_run(options(tmp_path), [])  # the first has left no checkpoint
    (tmp_path / "work" / "checkpoint-4").mkdir()
    module._check_run(options(tmp_path, threads=2), [])
    with pytest.raises(ConfigError, match="checkpoints of other settings or data"):
        module._check_run(options(tmp_path, rank=4), [])
    (tmp_path / "work" / "finetune.json").unlink()
    with pytest.raises(ConfigError, match="checkpoints of other settings or data"):
        module._check_run(options(tmp_path), [])


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    """The result, or anything else, may be in the same folder."""
    (tmp_path / "chats.jsonl").touch()
    finetune(options(tmp_path, work=tmp_path, epochs=1), EXAMPLES, lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chats.jsonl", "out"]


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        finetune(options(tmp_path), EXAMPLES, lambda line: None)


def test_a_drafter_with_a_trimmed_vocabulary_is_refused(tmp_path: Path) -> None:
    load_tokenizer(MODEL).save_pretrained(tmp_path / "model")
    save_trimmed(tiny_model("llama-gqa", vocab_size=2048), list(range(100)), tmp_path / "model")
    with pytest.raises(ConfigError, match="trimmed vocabulary"):
        finetune(options(tmp_path, model=str(tmp_path / "model")), EXAMPLES, lambda line: None)


def test_rows_without_anything_to_learn_are_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "Yes."}]
    with pytest.raises(ConfigError, match="nothing is learned within 4 tokens"):
        finetune(options(tmp_path, max_length=4), [Example(1, messages=chat)], lambda line: None)
