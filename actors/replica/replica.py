"""A model, its link and its loop: what one actor holds, whichever process it lives in."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from actors.drafter.loop import Drafter
from actors.loading.checkpoint import ModelSpec, load_model, load_tokenizer
from actors.loading.grammar_tokenizer import structure_tokenizer
from actors.loading.memory_budget import column_bytes, fit_slots, room_for_slots, weights_on_devices
from actors.loading.supported import try_out
from actors.loading.tensor_parallel import Rank, TensorParallelGroup, load_sharded_runner
from actors.loading.tokenizer_pairs import load_draft_mappings, load_logits_mappings
from actors.loops.grammar_jobs import LoadTokenizer
from actors.loops.thread import LoopThread, LoopTimes
from actors.model.faster_layers import use_faster_layers
from actors.model.forward_input import RowInput
from actors.model.runner import Runner
from actors.replica.shared_weights import Loop, SharedWeightsLoop
from actors.target.colocated_drafter import ColocatedDrafter
from actors.target.loop import Target
from actors.tokenizers.draft_mapping import DraftMapping
from actors.tokenizers.logits_mapping import LogitsMapping
from actors.wire.link import ConnectingLink
from actors.wire.messages import Report
from actors.wire.zmq_link import ReplicaZmqLink
from decoding.errors import ConfigError

Role = Literal["target", "drafter", "both"]

_NOTICE_S = 2.5  # until all coordinators know that a replica is leaving: they ask every second
_POLL_S = 0.05


def load_runner(spec: ModelSpec, rank: Rank | None = None, *, role: Role = "target") -> Runner:
    """The model of `spec` over its KV slots, which are allocated, and the first slow step taken.

    Args:
        rank: of a model that is spread over several devices, this process's place among those that have its parts.
        role: with "both" there is memory for as many slots again.

    Raises:
        ConfigError: the model can't be loaded or served, or it or its slots don't fit into memory.
    """
    if rank is not None:
        return load_sharded_runner(spec, TensorParallelGroup(rank))
    model = load_model(spec)
    weights = weights_on_devices(model)
    use_faster_layers(model)
    try:
        column = column_bytes(try_out(model), spec.kv_torch_dtype)
    except ConfigError as error:
        raise ConfigError(f"models.{spec.name}.path: {spec.path!r} can't be served: {error}") from error
    max_query = max(spec.prefill_chunk, 64)
    capacity = spec.max_length + max_query
    copies = 2 if role == "both" else 1
    slot_bytes = {device: copies * size * capacity for device, size in column.items()}
    room = room_for_slots(column, weights, spec.memory_bytes)
    slots = fit_slots(spec.name, spec.slots, slot_bytes=slot_bytes, room=room, capacity=capacity)
    runner = Runner(model, slots=slots, max_length=spec.max_length, max_query=max_query)
    runner.cache.dtype = spec.kv_torch_dtype
    runner.logits([RowInput(slot=0, start=0, tokens=[0])])
    runner.use_trace()
    return runner


def make_loop(
    role: Role,
    runner: Runner,
    link: ConnectingLink,
    *,
    prefill_chunk: int,
    load_tokenizer: LoadTokenizer | None = None,
    draft_mappings: Mapping[str, DraftMapping] | None = None,
    inside: Runner | None = None,
    logits_mappings: Mapping[str, LogitsMapping] | None = None,
) -> Loop:
    """The loop of that role over a runner and a link.

    Args:
        runner: with the role "both", a twin of it is for drafting.
        load_tokenizer: for structured answers.
        draft_mappings: of a drafter, by the names of its targets that have another tokenizer.
        inside: of a target, the model that drafts by turns with it.
        logits_mappings: of a member of ensembles, by the names of its leaders that have another tokenizer.
    """
    options: dict[str, Any] = {"prefill_chunk": prefill_chunk, "load_tokenizer": load_tokenizer}
    draft_mapping = next(iter((draft_mappings or {}).values()), None)
    drafter_inside = None if inside is None else ColocatedDrafter(inside, draft_mapping=draft_mapping, **options)
    make_target: Callable[[ConnectingLink], Target] = partial(
        Target, runner, colocated_drafter=drafter_inside, logits_mappings=logits_mappings, **options
    )
    if role == "target":
        return make_target(link)
    drafting = runner if role == "drafter" else runner.shared_copy()
    make_drafter: Callable[[ConnectingLink], Drafter] = partial(
        Drafter, drafting, draft_mappings=draft_mappings, **options
    )
    return make_drafter(link) if role == "drafter" else SharedWeightsLoop(link, make_target, make_drafter)


class Replica:
    """A replica that other processes reach over ZeroMQ."""

    def __init__(
        self,
        role: Role,
        spec: ModelSpec,
        host: str,
        *,
        targets: Sequence[ModelSpec] = (),
        inside: ModelSpec | None = None,
        leaders: Sequence[ModelSpec] = (),
        rank: Rank | None = None,
    ) -> None:
        """Loads the model and starts the loop; raises ConfigError if it can't.

        Args:
            host: the address to listen on.
            targets: what a drafter drafts for.
            inside: what drafts for a target in its own process.
            leaders: of ensembles that a target is a member of, if they may have another tokenizer.
            rank: 0, of a model that is spread over several devices, whose other parts are elsewhere.
        """
        self._link = ReplicaZmqLink(spec.name, host)
        self.address = self._link.address
        self._loop: Loop
        prepare = partial(self._load, role, spec, targets, inside, leaders, rank)
        self._thread = LoopThread(self._link.name, self._turn, self._link.wake, prepare=prepare)
        try:
            self._thread.start()
        except BaseException:
            self._link.close()
            raise

    def _load(
        self,
        role: Role,
        spec: ModelSpec,
        targets: Sequence[ModelSpec],
        inside: ModelSpec | None,
        leaders: Sequence[ModelSpec],
        rank: Rank | None,
    ) -> None:
        drafter = None if inside is None else load_runner(inside)
        runner = load_runner(spec, rank, role=role)
        self._thread.usual_turn_s = _measure_prefill(runner, min(spec.prefill_chunk, runner.max_query))
        if inside is not None:
            targets = [spec]
        self._loop = make_loop(
            role,
            runner,
            self._link,
            prefill_chunk=spec.prefill_chunk,
            load_tokenizer=lambda: structure_tokenizer(load_tokenizer(spec.path, spec.revision)),
            draft_mappings=load_draft_mappings(inside or spec, targets) if targets else None,
            inside=drafter,
            logits_mappings=load_logits_mappings(spec, leaders) if leaders else None,
        )

    def _turn(self) -> None:
        self._loop.turn()

    @property
    def times(self) -> LoopTimes:
        """Where the loop's time went so far."""
        return self._loop.times

    @property
    def malformed(self) -> int:
        """Batches of messages that made no sense, and were dropped."""
        return self._link.malformed

    def check(self) -> None:
        """The health check: raises UnavailableError if the loop has ended or is stuck."""
        self._thread.check()

    def report(self) -> Report:
        """The load at this moment."""
        return self._loop.load()

    def drain(self, timeout_s: float) -> None:
        """Stop when nothing is left to do, or after `timeout_s`. Coordinators must have been told to look elsewhere."""
        began_s = time.monotonic()
        notice_s = min(_NOTICE_S, timeout_s)
        while (waited_s := time.monotonic() - began_s) < timeout_s:
            load = self.report()
            if waited_s >= notice_s and load.active + load.waiting == 0:
                break
            time.sleep(_POLL_S)
        self.stop()

    def stop(self) -> None:
        """End the loop after its current turn, and close the link."""
        self._thread.stop()
        self._link.close()


def _measure_prefill(runner: Runner, tokens: int) -> float:
    """Seconds of a whole chunk of a prompt, the longest that a turn works on. Scribbles over slot 0."""
    began_s = time.perf_counter()
    runner.logits([RowInput(slot=0, start=0, tokens=[0] * tokens)], last_only=True).argmax(dim=-1).tolist()
    return time.perf_counter() - began_s
