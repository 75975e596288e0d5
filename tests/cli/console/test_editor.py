"""Messages of several lines, history and completion, as keys of a simulated keyboard."""

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from cli.console.editor import (
    PipeReader,
    SlashCompleter,
    TerminalEditor,
    history_file,
    is_complete,
    strip_marks,
)

ENTER, ALT_ENTER, UP, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\x03", "\x04"


@pytest.fixture
def keyboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


def editor() -> TerminalEditor:
    return TerminalEditor(lambda text: (), lambda: "toolbar")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hi" + ENTER, "hi"),
        ("a" + ALT_ENTER + "b" + ENTER, "a\nb"),
        ("a\\" + ENTER + "b" + ENTER, "a\nb"),
        ('"""a' + ENTER + ENTER + 'b"""' + ENTER, "a\n\nb"),
        ("\x1b[200~a\nb\x1b[201~" + ENTER, "a\nb"),  # pasted
    ],
)
def test_keys(keyboard: PipeInput, keys: str, message: str) -> None:
    keyboard.send_text(keys)
    assert editor().read() == message


def test_the_history_survives_and_is_private(keyboard: PipeInput) -> None:
    keyboard.send_text("one" + ENTER)
    editor().read()
    assert history_file().stat().st_mode & 0o077 == 0
    keyboard.send_text(UP + "!" + ENTER)
    assert editor().read() == "one!"


def test_without_a_place_for_it_the_history_is_forgotten(
    keyboard: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    keyboard.send_text("one" + ENTER)
    assert editor().read() == "one"


@pytest.mark.parametrize(
    ("text", "completed"),
    [("/te", ["/temperature"]), ("/speculate o", ["on", "off"]), ("/speculate of", ["off"]), ("te", [])],
)
def test_completion(text: str, completed: list[str]) -> None:
    completer = SlashCompleter(lambda text: ["on", "off"] if " " in text else ["/temperature", "/clear"])
    completions = list(completer.get_completions(Document(text), CompleteEvent()))
    assert [completion.text for completion in completions] == completed
    assert all(text.endswith(completion.text[: -completion.start_position]) for completion in completions)


@pytest.mark.parametrize(("key", "error"), [(CTRL_C, KeyboardInterrupt), (CTRL_D, EOFError)])
def test_leaving(keyboard: PipeInput, key: str, error: type[BaseException]) -> None:
    keyboard.send_text(key)
    with pytest.raises(error):
        editor().read()


def test_a_pipe_is_read_line_by_line() -> None:
    reader = PipeReader(io.StringIO('a\nb\\\nc\n\n"""d\n"""\n"""open\nend'))
    assert [reader.read() for _ in range(5)] == ["a", "b\nc", "", "d", '"""open\nend']
    with pytest.raises(EOFError):
        reader.read()


@pytest.mark.parametrize(
    ("text", "complete"),
    [("", True), ("a", True), ("a\\", False), ('"""', False), ('"""a', False), ('"""a"""', True), ('a"""', True)],
)
def test_when_enter_sends(text: str, complete: bool) -> None:
    assert is_complete(text) is complete


def test_the_message_has_no_marks() -> None:
    assert strip_marks('"""\na\\b\n"""') == "a\\b"
