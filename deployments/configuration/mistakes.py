"""Collects what is wrong in a configuration, so that one answer has all of it."""

from collections.abc import Iterator
from contextlib import contextmanager

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
