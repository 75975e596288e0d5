"""How lines are read as commands."""

import pytest

from cli.console.chat import COMMANDS, Call, read, switch
from decoding.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("line", "read_as"),
    [
        ("hello", "hello"),
        ("/clear", Call("clear", "")),
        ("/", Call("help", "")),
        ("/set stop  a b ", Call("set", "stop  a b")),
        ("/tempe 0.5", Call("temperature", "0.5")),
        ("/system Be\nkind.", Call("system", "Be\nkind.")),
        ("//etc/passwd?", "/etc/passwd?"),
    ],
)
def test_lines(line: str, read_as: Call | str) -> None:
    assert read(line) == read_as


@pytest.mark.parametrize(
    ("line", "problem"),
    [("/sepculate", "did you mean 'speculate'"), ("/s", "'set' or 'show' or"), ("/usr/bin?", "write //")],
)
def test_unknown_commands_suggest_others(line: str, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        read(line)


def test_switches() -> None:
    assert switch("colours", "on") is True
    assert switch("colours", "off") is False
    with pytest.raises(InvalidRequestError, match="on or off, not 'green'"):
        switch("colours", "green")


def test_every_command_is_explained() -> None:
    assert all(command.meaning for command in COMMANDS.values())
