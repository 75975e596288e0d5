"""docs/console.md and docs/audit.md say what the code says."""

import pytest
from click.testing import CliRunner

from cli import shell
from cli.console.chat import COMMANDS, KEYS
from deployments.configuration.paths import ROOT

PAGE = (ROOT / "docs" / "console.md").read_text(encoding="utf-8")
AUDIT = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["audit", "chat", "complete", "report", "status"])
def test_the_help_of_every_command_is_documented(command: str) -> None:
    result = CliRunner().invoke(shell.main, [command, "--help"], prog_name="consort", terminal_width=100)
    assert f"```text\n{result.output}```" in PAGE + AUDIT, result.output


def test_every_slash_command_and_key_is_documented() -> None:
    rows = [f"| `{f'/{name} {command.usage}'.strip()}` | {command.meaning} |" for name, command in COMMANDS.items()]
    rows += [f"| {key} | {meaning} |" for key, meaning in KEYS.items()]
    assert "\n".join(rows[: len(COMMANDS)]).replace("on|off", "on\\|off") in PAGE
    assert "\n".join(rows[len(COMMANDS) :]) in PAGE
