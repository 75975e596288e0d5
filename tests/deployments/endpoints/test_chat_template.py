"""Every chat template has a place for tools, or gets one; a configuration may bring another template."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from decoding.errors import ConfigError
from deployments.configuration.config import ServerConfig, load_config, parse_config
from deployments.configuration.paths import ROOT
from deployments.endpoints.chat_template import set_chat_template, tools_of
from deployments.endpoints.loading import load_endpoints
from engine.loading.settings import load_tokenizer

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}\n" + PLAIN
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ABOUT = """# Tools

You can call these functions, given as JSON:
<tools>
{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
</tools>

To call one, write its name and its arguments between these tags, as in
<tool_call>
{"name": "a_function", "arguments": {"an_argument": "its value"}}
</tool_call>
What a function returns comes back between <tool_response> tags. Answer without a call where none helps."""


def call(city: str) -> dict[str, Any]:
    return {"type": "function", "id": city, "function": {"name": "weather", "arguments": {"city": city}}}


TURNS: Any = [
    {"role": "user", "content": "Rome and Ulm?"},
    {"role": "assistant", "content": None, "tool_calls": [call("Rome"), call("Ulm")]},
    {"role": "tool", "tool_call_id": "Rome", "content": "sun"},
    {"role": "tool", "tool_call_id": "Ulm", "content": [{"type": "text", "text": "rain"}]},
    {"role": "assistant", "content": "Sun and rain."},
    {"role": "user", "content": "Thanks."},
]
REST = """[assistant]<tool_call>
{"name": "weather", "arguments": {"city": "Rome"}}
</tool_call>
<tool_call>
{"name": "weather", "arguments": {"city": "Ulm"}}
</tool_call>
[user]<tool_response>
sun
</tool_response>
<tool_response>
rain
</tool_response>
[assistant]Sun and rain.
[user]Thanks.
"""


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(ROOT / "models" / "target"))


def render(tokenizer: Any, turns: list[dict[str, Any]], tools: Any = None) -> str:
    return str(tokenizer.apply_chat_template(turns, tools=tools, tokenize=False))


@pytest.mark.parametrize(
    ("template", "turns", "begin"),
    [
        (PLAIN, TURNS, f"[system]{ABOUT}\n[user]Rome and Ulm?\n"),
        (
            PLAIN,
            [{"role": "system", "content": "Be brief."}, *TURNS],
            f"[system]Be brief.\n\n{ABOUT}\n[user]Rome and Ulm?\n",
        ),
        (DROPS_SYSTEM, TURNS, f"[user]{ABOUT}\n\nRome and Ulm?\n"),
        (NO_SYSTEM, TURNS, f"[user]{ABOUT}\n\nRome and Ulm?\n"),
    ],
)
def test_tools_calls_and_results_are_shown_as_text(
    tokenizer: PreTrainedTokenizerBase, template: str, turns: list[dict[str, Any]], begin: str
) -> None:
    set_chat_template(tokenizer, template)
    assert tools_of(tokenizer) == "built-in"
    assert render(tokenizer, turns, TOOLS) == begin + REST
    assert REST in render(tokenizer, turns)  # earlier calls are shown without tools, too


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM, "\n  {{ messages | tojson }}{{ add_generation_prompt }}"])
def test_a_conversation_without_tools_is_as_before(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    turns = [TURNS[0], TURNS[4], TURNS[5]]
    tokenizer.chat_template = template
    expected = render(tokenizer, turns)
    set_chat_template(tokenizer, None)
    assert render(tokenizer, turns) == expected


def test_a_template_with_tools_stays(tokenizer: PreTrainedTokenizerBase) -> None:
    template = PLAIN + "{{ tools }}<tool_call>"
    set_chat_template(tokenizer, template)
    assert (tokenizer.chat_template, tools_of(tokenizer)) == (template, "model")


def config(folder: Path, template: str) -> ServerConfig:
    target = {"path": str(ROOT / "models" / "target"), "chat_template": template}
    return parse_config({"models": {"m": target}, "endpoints": {"e": {"target": "m"}}}, folder=folder)


@pytest.mark.parametrize("given", ["own.jinja", "{{ messages[0].content }}!"])
def test_a_configuration_brings_a_template(tmp_path: Path, given: str) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    endpoint = load_endpoints(config(tmp_path, given))["e"]
    assert render(endpoint.encoder.tokenizer, [TURNS[0]]) == "Rome and Ulm?!"


def test_mistakes_name_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.chat_template: can't read .*none\.jinja"):
        config(tmp_path, "none.jinja")
    with pytest.raises(ConfigError, match=r"models\.m\.chat_template: line 1: "):
        load_endpoints(config(tmp_path, "{% if %}"))


def test_the_default_model_takes_tools() -> None:
    (endpoint,) = load_endpoints(load_config()).values()
    assert endpoint.encoder.tools == "built-in"
    assert endpoint.token_decoder.tool_format == "hermes"


def test_a_broken_template_of_a_checkpoint_fails_no_start(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{% if %}"
    set_chat_template(tokenizer, None)
    assert tokenizer.chat_template == "{% if %}"
