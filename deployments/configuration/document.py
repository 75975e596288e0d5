"""Reads a YAML document, and collects the mistakes of a configuration, so that one answer has all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from decoding.errors import ConfigError


class Mistakes:
    """Mistakes in a configuration, a line each, in the order in which they were found."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def note(self, line: str) -> None:
        """Remember a mistake."""
        self._lines.append(line)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Remember the block's ConfigError, if it raises one, instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.note(str(error))

    def check(self) -> None:
        """Raise ConfigError if there are mistakes."""
        if len(self._lines) == 1:
            raise ConfigError(self._lines[0])
        if self._lines:
            raise ConfigError("\n  ".join([f"{len(self._lines)} mistakes", *self._lines]))


_HINTS = {  # by a part of the parser's complaint
    "'\\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "put values with ': ' in quotes",
    "but got": "put values with special characters in quotes",
    "could not determine a constructor": "tags are not supported; remove it",
    "but found another document": "keep one document, without a line of '---' in it",
}


def read_document(path: Path) -> object:
    """Return what a YAML file says.

    Raises:
        ConfigError: the file can't be read, is empty, is no YAML, or has keys twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data: object = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: it is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"can't read {path}: {_in_a_line(error)}") from error
    if root is None or data is None:
        raise ConfigError(f"{path}: the file is empty; it should have `models` and `endpoints`")
    mistakes = Mistakes()
    for key, line in _repeated_keys(root, (), set()):
        mistakes.note(f"{path}: {key}: is there twice, again in line {line}; keep one of them")
    mistakes.check()
    return data


def _in_a_line(error: yaml.YAMLError) -> str:
    """Return where the document is wrong, how, and what helps, without line breaks."""
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    hint = next((hint for part, hint in _HINTS.items() if part in problem), None)
    return f"{where}{problem}" + (f"; {hint}" if hint else "")


def _repeated_keys(node: yaml.Node, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, int]]:
    """Yield the dotted path and the line of every key that its mapping has already. seen: nodes, for aliases."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, (*path, str(index)), seen)
    elif isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            inner = (*path, str(key.value))
            if key.value in names and key.tag != "tag:yaml.org,2002:merge":
                yield ".".join(inner), key.start_mark.line + 1
            names.add(str(key.value))
            yield from _repeated_keys(value, inner, seen)
