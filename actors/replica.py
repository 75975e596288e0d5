"""A model, its link and its loop: what one actor holds, whichever process it lives in."""

import secrets
from typing import Literal

from actors.compatibility import try_out
from actors.drafter import Drafter
from actors.link import ConnectingLink
from actors.loading import ModelSpec, load_model, load_tokenizer
from actors.loop import LoopThread, LoopTimes
from actors.memory import column_bytes, fit_slots, room_for_slots, weights_on_devices
from actors.messages import Report
from actors.native.norm import replace_norms
from actors.packing import pack_linears
from actors.row_input import RowInput
from actors.runner import Runner
from actors.structure_tokenizer import structure_tokenizer
from actors.structures import LoadTokenizer
from actors.target import Target
from actors.zmq_link import ReplicaZmqLink
from decoding.errors import ConfigError

Role = Literal["target", "drafter"]


def load_runner(spec: ModelSpec) -> Runner:
    """The model of `spec` over its KV slots, which are allocated, and the first slow step taken.

    Raises:
        ConfigError: the model can't be loaded or served, or it or its slots don't fit into memory.
    """
    model = load_model(spec)
    weights = weights_on_devices(model)
    pack_linears(model)
    replace_norms(model)
    try:
        column = column_bytes(try_out(model), spec.kv_torch_dtype)
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}.path: {spec.path!r} can't be served: {error}") from error
    max_query = max(spec.prefill_chunk, 64)
    capacity = spec.max_length + max_query
    slot_bytes = {device: size * capacity for device, size in column.items()}
    room = room_for_slots(column, weights, spec.memory_bytes)
    slots = fit_slots(spec.name, spec.slots, slot_bytes=slot_bytes, room=room, capacity=capacity)
    runner = Runner(model, slots=slots, max_length=spec.max_length, max_query=max_query)
    runner.cache.dtype = spec.kv_torch_dtype
    runner.logits([RowInput(slot=0, start=0, tokens=[0])])
    return runner


def make_loop(
    role: Role, runner: Runner, link: ConnectingLink, *, prefill_chunk: int, load_tokenizer: LoadTokenizer | None = None
) -> Target | Drafter:
    """The loop of that role over a runner and a link. load_tokenizer: for structured answers."""
    loop = Target if role == "target" else Drafter
    return loop(runner, link, prefill_chunk=prefill_chunk, load_tokenizer=load_tokenizer)


class Replica:
    """A replica that other processes reach over ZeroMQ."""

    def __init__(self, role: Role, spec: ModelSpec, host: str) -> None:
        """host: the address to listen on. Loads the model and starts the loop; raises ConfigError if it can't."""
        name = f"{spec.name}-{secrets.token_hex(4)}"
        self._link = ReplicaZmqLink(name, spec.name, host)
        self.address = self._link.address
        self._loop: Target | Drafter
        self._thread = LoopThread(name, self._turn, self._link.wake, prepare=lambda: self._load(role, spec))
        try:
            self._thread.start()
        except BaseException:
            self._link.close()
            raise

    def _load(self, role: Role, spec: ModelSpec) -> None:
        self._loop = make_loop(
            role,
            load_runner(spec),
            self._link,
            prefill_chunk=spec.prefill_chunk,
            load_tokenizer=lambda: structure_tokenizer(load_tokenizer(spec.path, spec.revision)),
        )

    def _turn(self) -> None:
        self._loop.turn()

    @property
    def times(self) -> LoopTimes:
        """Where the loop's time went so far."""
        return self._loop.times

    def check(self) -> None:
        """The health check: raises UnavailableError if the loop has ended or is stuck."""
        self._thread.check()

    def report(self) -> Report:
        """The load at this moment."""
        return self._loop.load()

    def stop(self) -> None:
        self._thread.stop()
        self._link.close()
