"""The terminal's keyboard while nothing is asked: what is typed then must not stand in the midst of a reply."""

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_echo() -> Iterator[None]:
    """Keys are not shown; those typed meanwhile are read afterwards. Ctrl-C still interrupts."""
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
