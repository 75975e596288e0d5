"""Objects in child processes, and programs in process groups of their own. They end with a `with` block.

A stopped process uses no CPU, so contestants that wait do not slow down the one that runs.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from engine.loading.host import compute_environment

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
_GRACE_S = 10.0  # for a child to end by itself
_PROGRAM_GRACE_S = 60.0
_POLL_S = 0.2
_OURS = ("OMP_", "GOMP_", "KMP_", "MKL_", "PYTHON", "VIRTUAL_ENV", "RAY_")  # prefixes of variables


class Pausable(Protocol):
    """What can be stopped while it is not measured."""

    def pause(self) -> None:
        """Use no CPU until `resume`."""

    def resume(self) -> None:
        """Go on."""


class ProcessGroup:
    """A process that leads a group of its own."""

    @property
    def pid(self) -> int:
        raise NotImplementedError

    def pause(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)


class Host(Pausable, Protocol[T_co]):
    """One object, in this process or in another."""

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the object: `host.call(Runner.forward, rows)`. Arguments and result must be picklable."""


class Local(Generic[T]):
    """An object in this process, which is never stopped."""

    def __init__(self, held: T) -> None:
        self._held = held

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self._held, *args, **kwargs)

    def pause(self) -> None:
        """Nothing to do."""

    def resume(self) -> None:
        """Nothing to do."""


class Child(ProcessGroup, Generic[T]):
    """An object in a child process, which ends with the `with` block."""

    def __init__(self, make: Callable[[], T], *, threads: int) -> None:
        """make: picklable. The process starts its imports at once, in parallel with other children."""
        saved = dict(os.environ)
        os.environ |= compute_environment(threads)  # children inherit it before they import torch
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(make, child_end), daemon=True)
        self._process.start()
        os.environ.clear()
        os.environ.update(saved)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def __enter__(self) -> "Child[T]":
        """Make the object, and wait until it is ready."""
        self._ask(None)
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        if self._process.is_alive():
            self.resume()
            self._process.join(_GRACE_S)
            self._process.kill()
        self._process.join()

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = self._ask((method, args, kwargs))
        return answer

    def _ask(self, question: object) -> Any:
        self._connection.send(question)
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(make: Callable[[], Any], connection: Connection) -> None:
    """Make the object on request, then call its methods, one request at a time."""
    os.setpgid(0, 0)
    held: Any = None
    while True:
        try:
            question = connection.recv()
        except EOFError:
            return
        try:
            if question is None:
                held = make()
                connection.send(None)
            else:
                method, args, kwargs = question
                connection.send(method(held, *args, **kwargs))
        except Exception as error:
            connection.send(error)


class Program(ProcessGroup):
    """A program whose messages go to a log."""

    def __init__(
        self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None, pipes: bool
    ) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if pipes else None,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                text=True,
                process_group=0,
                env=environment and dict(environment),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self.resume()
            self._end()
            try:
                self._process.wait(_PROGRAM_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()
        for pipe in filter(None, (self._process.stdin, self._process.stdout)):
            pipe.close()

    def _end(self) -> None:
        self._process.terminate()


class Server(Program):
    """A server that starts at once. `with` waits until it answers."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        ready: Callable[[], bool],
        start_s: float,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        ready: returns whether the server answers.
        start_s: maximum seconds until it does.
        """
        super().__init__(command, log=log, environment=environment, pipes=False)
        self._ready, self._start_s = ready, start_s

    def __enter__(self) -> Self:
        """Raises RuntimeError if the server ends or takes too long."""
        deadline_s = time.monotonic() + self._start_s
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.__exit__()
                raise RuntimeError(f"the server did not come up; see {self._log}")
            time.sleep(_POLL_S)
        return self


def foreign_environment() -> dict[str, str]:
    """Return the environment for other projects' programs: without variables that are for ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
