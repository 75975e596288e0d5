"""A scripted server, and consoles whose output can be read."""

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from tests.cli.fake_server import FakeServer, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def terminal() -> Console:
    """80 columns, with colours; read it with `shown`."""
    return Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80, highlight=False)


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), highlight=False)


def shown(console: Console) -> str:
    """What was printed, escape sequences included."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
