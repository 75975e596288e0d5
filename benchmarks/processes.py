"""Replicas in processes of their own, as Ray would place them, but without Ray."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from types import TracebackType

from transformers.utils.logging import disable_progress_bar

from actors.environment import compute_environment
from actors.link import ReplicaAddress
from actors.loading import ModelSpec
from actors.loop import LoopTimes
from actors.replica import Replica, Role


class ReplicaProcess:
    """One replica in a child process, which ends with the `with` block."""

    def __init__(self, role: Role, spec: ModelSpec) -> None:
        os.environ |= compute_environment(spec.threads)  # children inherit it
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(role, spec, child_end), daemon=True)

    def __enter__(self) -> "ReplicaProcess":
        self._process.start()
        self.address: ReplicaAddress = self._connection.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.send("stop")
        self._process.join()

    def times(self) -> LoopTimes:
        """Where the replica's time went since it started."""
        self._connection.send("times")
        times: LoopTimes = self._connection.recv()
        return times


def _serve(role: Role, spec: ModelSpec, connection: Connection) -> None:
    disable_progress_bar()
    replica = Replica(role, spec, "127.0.0.1")
    connection.send(replica.address)
    while connection.recv() == "times":
        connection.send(replica.times)
    replica.stop()
