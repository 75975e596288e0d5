"""`consort finetune` and drafters without training: what they print and write, and what they refuse."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

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


def pruned(folder: Path, *options: str) -> Result:
    arguments = ("--epochs", "0", "--tokens", "400", "--answer-tokens", "32", "--threads", "1", "--dtype", "float32")
    return invoke("train", "drafter", TARGET, "--output", folder, *arguments, *options)


def test_fewer_layers(tmp_path: Path) -> None:
    result = pruned(tmp_path / "small", "--layers", "0,2,3,5", "--vocabulary", "0")
    assert result.exit_code == 0, result.output
    before = load_file(Path(TARGET) / "model.safetensors")["model.layers.5.mlp.up_proj.weight"]
    after = load_file(tmp_path / "small" / "model.safetensors")["model.layers.3.mlp.up_proj.weight"]
    assert before.equal(after)
    assert load_model(ModelSpec(name="small", path=str(tmp_path / "small"), device="cpu")).config.num_hidden_layers == 4


def test_fewer_tokens_can_only_draft(tmp_path: Path) -> None:
    result = pruned(tmp_path / "few", "--vocabulary", "300", "--layers", "2")
    assert result.exit_code == 0, result.output
    assert load_model(ModelSpec(name="few", path=str(tmp_path / "few"), device="cpu")).config.vocab_size == 2048
    models = {"target": {"path": TARGET}, "few": {"path": str(tmp_path / "few")}}
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
    [(("--layers", "one"), "is neither a number of layers"), (("--layers", "7"), "7 layers can't be kept of 6")],
)
def test_layers_that_can_not_be_kept(options: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    result = pruned(tmp_path / "small", *options)
    assert result.exit_code != 0
    assert reason in result.output
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("command", ["prune", "compress", "convert-heads"])
def test_commands_that_are_gone_name_what_does_their_work(command: str) -> None:
    result = invoke(command, "models/target", "--output", "x")
    assert result.exit_code == 2
    assert f"`consort {command}` is gone: " in result.output


def test_a_folder_that_exists_is_kept(tmp_path: Path, data: Path) -> None:
    result = invoke("finetune", TARGET, data, "--output", tmp_path)
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
