"""The commands of `consort chat`: names, help texts and parsing."""

from collections.abc import Mapping
from dataclasses import dataclass

from decoding.errors import InvalidRequestError
from deployments.fields.strict import nearest


@dataclass(frozen=True, slots=True)
class Command:
    """A command's arguments and help text."""

    usage: str  # arguments after the name
    meaning: str


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "these commands, and the keys"),
    "set": Command("NAME=VALUE", "set a request parameter; null forgets it; alone: what can be set"),
    "show": Command("", "the model, the parameters and the size of the conversation"),
    "model": Command("NAME", "talk to another model; alone: which there are"),
    "speculate": Command("on|off", "with the drafter, or the target alone: the same text"),
    "draft-length": Command("N", "the most draft tokens that one target step verifies"),
    "temperature": Command("X", "0 is greedy"),
    "system": Command("TEXT", "the system prompt; off removes it; alone: shows it"),
    "template": Command("NAME", "send messages through a prompt template; off: as they are; alone: which there are"),
    "clear": Command("", "forget the conversation; the settings stay"),
    "retry": Command("", "answer the last message again"),
    "compare": Command("MESSAGE", "speculative against the target alone; by default the last message"),
    "colours": Command("on|off", "show by colour how each token came to be"),
    "quit": Command("", "leave, as Ctrl-D does"),
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

    Raises:
        InvalidRequestError: there is no such command.
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
