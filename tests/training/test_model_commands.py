"""`consort prune` and `consort finetune`: what they print and write, and what they refuse."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoConfig

from cli import shell
from deployments.configuration.config import parse_config
from deployments.endpoints.loading import load_endpoints
from engine.loading.checkpoint import ModelSpec, load_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
TARGET = str(Path("models/target").resolve())


def invoke(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(shell.main, [str(argument) for argument in arguments])


def shown_models(result: Result) -> dict[str, dict[str, str]]:
    """Return the lines of configuration that a command printed."""
    loaded: dict[str, dict[str, str]] = yaml.safe_load(result.output.split("Serve it by a line")[1].split("\n", 1)[1])
    return loaded


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "I am well, thank you."}]
    file.write_text(json.dumps({"messages": chat}), encoding="utf-8")
    return file


def test_fewer_layers(tmp_path: Path) -> None:
    result = invoke("prune", TARGET, "--output", tmp_path / "small", "--layers", "3", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert result.output.count("dropped") == 3
    assert AutoConfig.from_pretrained(tmp_path / "small").num_hidden_layers == 3
    config = {"models": shown_models(result), "endpoints": {"small": {"target": "small"}}}
    assert load_endpoints(parse_config(config, folder=tmp_path)).keys() == {"small"}


def test_named_layers(tmp_path: Path) -> None:
    result = invoke("prune", TARGET, "--output", tmp_path / "small", "--drop-layers", "1,4", "--threads", "1")
    assert result.exit_code == 0, result.output
    before = load_file(Path(TARGET) / "model.safetensors")["model.layers.5.mlp.up_proj.weight"]
    after = load_file(tmp_path / "small" / "model.safetensors")["model.layers.3.mlp.up_proj.weight"]
    assert before.equal(after)


def test_fewer_tokens_can_only_draft(tmp_path: Path, data: Path) -> None:
    result = invoke(
        "prune", TARGET, "--output", tmp_path / "few", "--vocabulary", "300", "--data", data, "--layers", "2",
        "--threads", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "300 of the target's tokens, so it can only draft" in result.output
    (few,) = shown_models(result).values()
    assert load_model(ModelSpec(name="few", path=few["path"], device="cpu")).config.vocab_size == 2048
    models = {"target": {"path": TARGET}, "few": few}
    drafting = {"models": models, "endpoints": {"e": {"target": "target", "drafter": "few"}}}
    served = load_endpoints(parse_config(drafting, folder=tmp_path))["e"]
    assert not served.through_text
    assert served.token_decoder.size == 2048
    for endpoint in ({"target": "few"}, {"kind": "ensemble", "members": ["target", "few"]}):
        endpoints = {"e": endpoint, "other": {"target": "target"}}
        refused = parse_config({"models": models, "endpoints": endpoints}, folder=tmp_path)
        with pytest.raises(ValueError, match=r"endpoints\.e: 'few' has a trimmed vocabulary, so it can only draft"):
            load_endpoints(refused)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((), "there is nothing to prune"),
        (("--layers", "2", "--drop-layers", "1"), "don't go together"),
        (("--drop-layers", "one"), "give layers like 3,5,8"),
        (("--drop-layers", "6"), "the model has layers 0 to 5"),
        (("--layers", "7"), "7 layers can't be kept of 6"),
        (("--layers", "2", "--data", "none.jsonl"), "none.jsonl: can't be read"),
    ],
)
def test_what_can_not_be_pruned(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    result = invoke("prune", TARGET, "--output", tmp_path / "small", *options)
    assert result.exit_code != 0
    assert reason in result.output
    assert not (tmp_path / "small").exists()


def test_a_folder_that_exists_is_kept(tmp_path: Path, data: Path) -> None:
    for command in (("prune", TARGET, "--layers", "2"), ("finetune", TARGET, data)):
        result = invoke(*command, "--output", tmp_path)
        assert "exists already" in result.output
    assert data.exists()


def test_finetuning_prints_how_to_serve_the_result(tmp_path: Path, data: Path) -> None:
    result = invoke(
        "finetune", "models/drafter", data, "--output", tmp_path / "tuned", "--epochs", "1", "--threads", "1"
    )
    assert result.exit_code == 0, result.output
    assert shown_models(result) == {"tuned": {"path": str(tmp_path / "tuned")}}
    load_model(ModelSpec(name="tuned", path=str(tmp_path / "tuned"), device="cpu"))


def test_finetuning_names_a_bad_line_first(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n{"texts": []}\n', encoding="utf-8")
    result = invoke("finetune", "no/such/model", file, "--output", tmp_path / "tuned")
    assert result.exit_code == 1
    assert "data.jsonl, line 2: is neither a chat nor a text" in result.output
