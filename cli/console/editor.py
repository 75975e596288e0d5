"""Read messages: from a line editor with history on a terminal, or from a pipe."""

import os
import sys
import termios
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

_QUOTES = '"""'
_PROMPT = "» "
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack"})

Suggest = Callable[[str], Iterable[str]]  # completions for the last word of a text


def is_complete(text: str) -> bool:
    """Whether Enter sends the text: not after a backslash or within three quotes."""
    if text.startswith(_QUOTES):
        return len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES)
    return not text.endswith("\\")


def strip_marks(text: str) -> str:
    """Return the text without the marks for several lines."""
    if text.startswith(_QUOTES) and is_complete(text):
        return text.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
    return text.replace("\\\n", "\n")


class TerminalEditor:
    """Reads messages from a terminal, with editing, history, completion and several lines."""

    def __init__(self, suggest: Suggest, toolbar: Callable[[], str]) -> None:
        """toolbar: returns the text below the line."""
        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            key_bindings=_bindings(),
            completer=SlashCompleter(suggest),
            complete_while_typing=False,
            auto_suggest=AutoSuggestFromHistory(),
            bottom_toolbar=toolbar,
            multiline=True,
            prompt_continuation=" " * len(_PROMPT),
            reserve_space_for_menu=4,
            style=_STYLE,
        )

    def read(self) -> str:
        """Return the next message. Raises EOFError at the end and KeyboardInterrupt at Ctrl-C."""
        return strip_marks(self._session.prompt(_PROMPT))


class PipeReader:
    """Reads messages from lines, without an echo."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def read(self) -> str:
        """Return the next message. Raises EOFError at the end."""
        text = ""
        for line in self._lines:
            text += line
            if is_complete(text.removesuffix("\n")):
                return strip_marks(text.removesuffix("\n"))
        if text:
            return strip_marks(text.removesuffix("\n"))
        raise EOFError


def history_file() -> Path:
    """Return the history's path in the user's state directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "consort" / "history"


def _history() -> History:
    """Open the history, readable for its owner only; in memory if the file can't be written."""
    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        if is_complete(event.current_buffer.text):
            event.current_buffer.validate_and_handle()
        else:
            event.current_buffer.insert_text("\n")

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class SlashCompleter(Completer):
    """Completes commands and their arguments; messages have none."""

    def __init__(self, suggest: Suggest) -> None:
        self._suggest = suggest

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        if text.startswith("/"):
            word = text.rsplit(" ", 1)[-1]
            for suggestion in self._suggest(text):
                if suggestion.startswith(word):
                    yield Completion(suggestion, start_position=-len(word))


@contextmanager
def without_echo() -> Iterator[None]:
    """Hide typed keys until the block ends; they are read afterwards. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = [*before]
    quiet[3] = before[3] & ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
