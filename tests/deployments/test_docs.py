"""The reference pages have every key, field and command of the code."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cli import shell
from deployments.apis.chat.request import ChatRequest
from deployments.apis.completions.request import CompletionRequest
from deployments.apis.messages.request import CountTokensRequest, MessagesRequest
from deployments.apis.responses.request import ResponsesRequest
from deployments.configuration.api_keys import ApiKeyConfig
from deployments.configuration.config import parse_config
from deployments.configuration.endpoint import EndpointConfig, NgramConfig
from deployments.configuration.heads import HeadsConfig
from deployments.configuration.http import HttpConfig, TracingConfig
from deployments.configuration.model import AdaptationConfig, ModelConfig
from deployments.configuration.paths import ROOT
from deployments.configuration.responses import ResponsesConfig
from deployments.fields.generation import GenerationRequest
from deployments.fields.prompts import TokenizeRequest

CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
HTTP = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")


def default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def config_row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {default(field)} | {field.description} |"


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig,
        AdaptationConfig,
        EndpointConfig,
        NgramConfig,
        HeadsConfig,
        HttpConfig,
        ApiKeyConfig,
        TracingConfig,
        ResponsesConfig,
    ],
)
def test_every_key_of_the_configuration_is_documented(model: type[BaseModel]) -> None:
    rows = [config_row(name, field) for name, field in model.model_fields.items()]
    assert "\n".join(rows) in CONFIGURATION, "\n".join(rows)


@pytest.mark.parametrize(
    "model",
    [
        GenerationRequest,
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        TokenizeRequest,
    ],
)
def test_every_field_of_a_request_is_documented(model: type[BaseModel]) -> None:
    rows = [f"| `{field.alias or name}` | {field.description} |" for name, field in model.model_fields.items()]
    missing = [row for row in rows if row not in HTTP]
    assert missing == []


@pytest.mark.parametrize("command", [[], ["serve"], ["demo"], ["models"], ["bench"], ["pull"], ["quantize"]])
def test_the_help_of_every_command_is_documented(command: list[str]) -> None:
    result = CliRunner().invoke(shell.main, [*command, "--help"], prog_name="consort", terminal_width=100)
    assert f"```text\n{result.output}```" in CONFIGURATION, result.output


@pytest.mark.parametrize("command", [["finetune"], ["train", "drafter"]])
def test_the_help_of_commands_that_make_models_is_documented(command: list[str]) -> None:
    result = CliRunner().invoke(shell.main, [*command, "--help"], prog_name="consort", terminal_width=100)
    assert f"```text\n{result.output}```" in TRAINING, result.output


def test_the_examples_are_valid_configurations() -> None:
    blocks = CONFIGURATION.split("```yaml\n")[1:]
    assert len(blocks) >= 2
    for block in blocks:
        parse_config(yaml.safe_load(block.split("```")[0]), folder=Path.cwd())
