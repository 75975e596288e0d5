"""`consort chat`: read messages and commands and stream answers until the user leaves."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.console.conversation import Conversation, Turn, as_written, choose_model
from cli.console.editor import without_echo
from cli.console.generation import CHAT, Generator
from cli.console.printer import TextPrinter, compare, summary
from decoding.errors import ConsortError, InvalidRequestError
from deployments.client import Client
from deployments.fields.strict import nearest


class Editor(Protocol):
    """A source of messages."""

    def read(self) -> str:
        """Return the next message. Raises EOFError at the end and KeyboardInterrupt at Ctrl-C."""


class Chat:
    """A conversation with a server on a console. After a failed command the chat goes on."""

    def __init__(self, client: Client, console: Console, conversation: Conversation, *, colours: bool = True) -> None:
        self._client, self._console = client, console
        self._notes = console if console.is_terminal else Console(stderr=True, highlight=False)
        self.conversation = conversation
        self.failed = False  # whether any line failed
        self._generator = Generator(client)
        self._printer = TextPrinter(console, colours=colours)
        self._ended = False
        self._last_seed: int | None = None

    def greet(self, card: Mapping[str, Any]) -> None:
        """Print the model, from its card, and how to get help."""
        by = f", drafted for by {proposers}" if (proposers := _proposers(card)) else ""
        self._console.print(Text.assemble((card["id"], "bold"), f" ({card.get('target')}{by}) at {self._client.url}"))
        self._note("/help lists commands. Ctrl-C stops a reply, Ctrl-D leaves.")
        if not card.get("ready", True):
            self._note("The model is still being loaded; the first reply will wait for it.")

    def run(self, editor: Editor) -> None:
        """Read and handle lines until /quit or the end of the input."""
        while not self._ended:
            try:
                line = editor.read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._note("Ctrl-D or /quit leaves.\n")
                continue
            try:
                with without_echo():
                    self.handle(line.strip())
            except ConsortError as error:
                self.failed = True
                self._notes.print(Text(str(error), style="red"))
                if "no chat template" in str(error):
                    self._note("`consort complete` continues texts without one.")
            except KeyboardInterrupt:
                self._note("Stopped.")

    def handle(self, line: str) -> None:
        """Run a command or send a message; an empty line does nothing. Raises ConsortError on failure."""
        if not line:
            return
        parsed = read(line)
        if isinstance(parsed, Call):
            COMMANDS[parsed.name].run(self, parsed.argument)
        else:
            self._send(parsed)

    def suggestions(self, text: str) -> Iterator[str]:
        """Yield completions for the last word of a command."""
        name, *rest = text.removeprefix("/").split(" ")
        if not rest:
            yield from (f"/{name}" for name in COMMANDS)
        elif name == "set" and len(rest) == 1:
            yield from self.conversation.parameters.names()
        elif name == "model" and len(rest) == 1:
            yield from (card["id"] for card in self._cards())
        elif name == "template" and len(rest) == 1:
            yield from (card["id"] for card in self._cards("templates"))
        elif COMMANDS.get(name) and COMMANDS[name].usage == "on|off" and len(rest) == 1:
            yield from ("on", "off")

    def toolbar(self) -> str:
        """Return the settings in one line."""
        values = self.conversation.parameters.values
        shown = (f"{name} {as_written(value)}" for name, value in values.items())
        return " · ".join([self.conversation.model, *shown, "/help"])

    def _send(self, message: str, turns: Sequence[Turn] | None = None) -> None:
        """Send a message after `turns`, and keep all of it if an answer comes. turns: None: the whole conversation."""
        printer = self._printer
        generation = printer.answer(self._generator, CHAT, self.conversation.request(message, turns))
        self._last_seed = self._last_seed if generation.seed is None else generation.seed
        if generation.text or not generation.stopped:
            if turns is not None:
                self.conversation.turns = list(turns)
            self.conversation.add(message, generation.text)
        if self._console.is_terminal:
            self._console.print(summary(generation, colours=printer.colours))
            self._console.print()

    def _compare(self, argument: str) -> None:
        message = argument or self.conversation.last_message
        if message is None:
            raise InvalidRequestError("/compare: there is no last message; give one: /compare MESSAGE")
        turns = None if argument else self.conversation.before_last_message()
        compare(self._generator, CHAT, self.conversation.request(message, turns), self._console, self._printer)

    def _retry(self, _: str) -> None:
        message = self.conversation.last_message
        if message is None:
            raise InvalidRequestError("/retry: there is no last message")
        self._send(message, self.conversation.before_last_message())

    def _help(self, _: str) -> None:
        commands = [(f"/{name} {command.usage}", command.meaning) for name, command in COMMANDS.items()]
        self._print_pairs([*commands, ("", ""), *KEYS.items()])

    def _set(self, argument: str) -> None:
        if argument:
            name, *text = re.split(r"\s*=\s*|\s+", argument, maxsplit=1)
            self._set_parameter(name, "".join(text))
            return
        self._print_pairs(self.conversation.parameters.described())

    def _set_parameter(self, name: str, text: str) -> None:
        """Set a parameter, or show it if there is no value."""
        parameters = self.conversation.parameters
        value = parameters.set(name, text) if text else parameters.values.get(name)
        self._note(f"{name}: {as_written(value)}")

    def _show(self, _: str) -> None:
        conversation = self.conversation
        settings = {
            "server": self._client.url,
            "model": conversation.model,
            "system": conversation.system or "–",
            "template": "–" if conversation.template is None else conversation.template["id"],
            "turns": str(len(conversation.turns)),
            "colours": "on" if self._printer.colours else "off",
            "last seed": "–" if self._last_seed is None else str(self._last_seed),
        }
        parameters = {name: as_written(value) for name, value in conversation.parameters.values.items()}
        self._print_pairs([*settings.items(), *parameters.items()])

    def _model(self, argument: str) -> None:
        if argument:
            self.conversation.model = choose_model(self._cards(), argument)["id"]
            self._note(f"model: {self.conversation.model}")
            return
        table = Table("", "model", "target", "drafts", "ready", box=SIMPLE, show_edge=False)
        for card in self._cards():
            chosen = "▸" if card["id"] == self.conversation.model else ""
            ready = "yes" if card.get("ready", True) else "no"
            table.add_row(chosen, card["id"], card.get("target") or "–", _proposers(card) or "–", ready)
        self._console.print(table)

    def _system(self, argument: str) -> None:
        if argument:
            self.conversation.system = None if argument == "off" else argument
        self._note(f"system: {self.conversation.system or '–'}")

    def _template(self, argument: str) -> None:
        if argument == "off":
            self.conversation.template = None
        elif argument:
            cards = {card["id"]: card for card in self._cards("templates")}
            if argument not in cards:
                problem = f"/template: there is no template {argument!r}; {nearest(argument, cards)}"
                raise InvalidRequestError(problem)
            self.conversation.template = cards[argument]
        else:
            for card in self._cards("templates"):
                self._console.print(Text.assemble((card["id"], "bold"), f"  {', '.join(card['variables'])}"))
            return
        self._note(f"template: {argument}")

    def _clear(self, _: str) -> None:
        self.conversation.turns.clear()
        self._note("The conversation is forgotten.")

    def _colours(self, argument: str) -> None:
        self._printer.colours = switch("colours", argument)
        self._note(f"colours: {argument}")

    def _quit(self, _: str) -> None:
        self._ended = True

    def _print_pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        for name, meaning in pairs:
            table.add_row(Text(name, style="bold"), Text(meaning))
        self._console.print(table)

    def _note(self, text: str) -> None:
        self._notes.print(Text(text, style="dim"))

    def _cards(self, kind: str = "models") -> list[dict[str, Any]]:
        cards: list[dict[str, Any]] = self._client.document(f"/v1/{kind}")["data"]
        return cards


def _proposers(card: Mapping[str, Any]) -> str:
    """Return what drafts for an endpoint: the drafter by its name, other proposers by their kind."""
    return ", ".join(card["drafter"] if name == "drafter" else name for name in card.get("proposers", []))


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a chat."""

    usage: str  # arguments after the name
    meaning: str
    run: Callable[[Chat, str], None]  # gets the argument


def _parameter(name: str) -> Callable[[Chat, str], None]:
    return lambda chat, argument: chat._set_parameter(name, argument)


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "these commands, and the keys", Chat._help),
    "set": Command("NAME=VALUE", "set a request parameter; null forgets it; alone: what can be set", Chat._set),
    "show": Command("", "the model, the parameters and the size of the conversation", Chat._show),
    "model": Command("NAME", "talk to another model; alone: which there are", Chat._model),
    "speculate": Command("on|off", "with the drafter, or the target alone: the same text", _parameter("speculate")),
    "draft-length": Command("N", "the most draft tokens that one target step verifies", _parameter("draft_length")),
    "temperature": Command("X", "0 is greedy", _parameter("temperature")),
    "system": Command("TEXT", "the system prompt; off removes it; alone: shows it", Chat._system),
    "template": Command(
        "NAME", "send messages through a prompt template; off: as they are; alone: which there are", Chat._template
    ),
    "clear": Command("", "forget the conversation; the settings stay", Chat._clear),
    "retry": Command("", "answer the last message again", Chat._retry),
    "compare": Command("MESSAGE", "speculative against the target alone; by default the last message", Chat._compare),
    "colours": Command("on|off", "show by colour how each token came to be", Chat._colours),
    "quit": Command("", "leave, as Ctrl-D does", Chat._quit),
}
KEYS: Mapping[str, str] = {
    "Enter": 'send; after a backslash, or within three quotes ("""), a new line',
    "Alt-Enter": "a new line",
    "Ctrl-C": "stop the reply, or empty the line",
    "Ctrl-D": "leave",
    "↑ ↓ Ctrl-R": "earlier messages, and a search among them",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A command with its argument."""

    name: str
    argument: str


def read(line: str) -> Call | str:
    """Parse a line as a command or a message. A message that begins with a slash is written with two.

    Raises InvalidRequestError if there is no such command.
    """
    if not line.startswith("/") or line.startswith("//"):
        return line.removeprefix("/") if line.startswith("//") else line
    written, *rest = line[1:].split(maxsplit=1) or ["help"]
    return Call(_full_name(written), rest[0].strip() if rest else "")


def _full_name(written: str) -> str:
    """Return the command with this name, or the only one that starts with it."""
    if written in COMMANDS:
        return written
    matches = [name for name in COMMANDS if name.startswith(written)]
    if len(matches) == 1:
        return matches[0]
    hint = nearest(written, COMMANDS)
    raise InvalidRequestError(f"/{written}: is not known; {hint} For a message that begins with /, write //.")


def switch(name: str, argument: str) -> bool:
    """Parse on or off; raises InvalidRequestError for anything else."""
    if argument not in ("on", "off"):
        raise InvalidRequestError(f"/{name}: should be on or off, not {argument!r}")
    return argument == "on"
