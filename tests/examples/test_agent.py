"""The agent of docs/agent.md, with a model that reads what the test says."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from deployments.configuration.config import load_config
from examples.agent import FILES, mend


def answer(messages: list[Any], tools: list[Any], tool_choice: Any, seed: int) -> SimpleNamespace:
    """Call the tool that is forced. The first replacement is a wrong one."""
    name = tool_choice["function"]["name"]
    (schema,) = [tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name]
    arguments = {"path": schema["properties"]["path"]["enum"][0]}
    if name == "replace_word":
        wrong, right = re.findall('"(.*?)"', messages[-1]["content"])
        arguments |= {"wrong": wrong, "right": "Mistake" if seed == 2 else right}
    jsonschema.validate(arguments, schema)
    call = SimpleNamespace(id=f"call{seed}", function=SimpleNamespace(name=name, arguments=json.dumps(arguments)))
    return SimpleNamespace(
        choices=[SimpleNamespace(message=SimpleNamespace(tool_calls=[call]))],
        usage=SimpleNamespace(completion_tokens=20),
        speculation={"steps": 5, "proposers": {"corpus": {"drafted": 16, "accepted": 15}}},
    )


@pytest.mark.parametrize("name", FILES)
def test_it_goes_on_until_the_test_passes(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    total = mend(answer, tmp_path / name, free=False)
    assert (tmp_path / name).read_text() == FILES[name][1]
    calls = 6  # read, test, replace, test, replace, test
    assert total == {
        "tokens": 20 * calls,
        "steps": 5 * calls,
        "corpus drafted": 16 * calls,
        "corpus accepted": 15 * calls,
    }
    assert f"{name}: mended" in capsys.readouterr().out


def test_its_configuration_can_be_served() -> None:
    assert load_config(Path("examples/agent.yaml")).corpus_of("smollm2") is not None
