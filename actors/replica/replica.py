"""A replica: one copy of a model, its link and its loop."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from actors.loops.adaptation import Adaptation, AdaptationOptions, Begin, LearnerProcess
from actors.loops.options import LoopOptions
from actors.loops.thread import LoopThread, LoopTimes
from actors.replica.roles import Loop, Role, make_loop
from actors.wire.messages import Report
from actors.wire.zmq_link import ReplicaZmqLink
from decoding.drafts.options import CorpusOptions
from engine.heads.proposer import HeadProposer
from engine.heads.spec import HeadsSpec
from engine.loading.checkpoint import ModelSpec
from engine.loading.host import stages
from engine.loading.new_weights import ReplaceableWeights, publish_weights
from engine.loading.runners import load_pair, load_runner, load_with_heads
from engine.loading.settings import load_tokenizer
from engine.loading.tensor_parallel import Rank
from engine.loading.token_mappings import load_draft_mappings, load_logits_mappings
from engine.loading.tokenizers import structure_tokenizer
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner
from engine.model.thread_choice import few_threads

_NOTICE_S = 2.5  # until all coordinators know that a replica is stopping; they ask every second
_POLL_S = 0.05
_PREFILL_PARTS = 8


def make_adaptation(options: AdaptationOptions, runner: Runner, spec: ModelSpec) -> Adaptation:
    """Return the adaptation of a drafter that was loaded by a spec."""
    begin = Begin(
        path=spec.path,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        safetensors_only=spec.safetensors_only,
        adapter=spec.adapter,
        texts=options.texts,
        update_after=options.update_after,
        learning_rate=options.learning_rate,
    )
    return Adaptation(options, partial(LearnerProcess, options.module, begin), partial(publish_weights, runner, spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """A model to load, what to do with it, and the models that it works with."""

    role: Role
    model: ModelSpec
    targets: Sequence[ModelSpec] = ()  # that a drafter drafts for
    leaders: Sequence[ModelSpec] = ()  # of ensembles with this model as a member; may have other tokenizers
    colocated: ModelSpec | None = None  # the drafter in a target's thread
    heads: HeadsSpec | None = None  # on a target's hidden states; not with a tensor-parallel group
    corpus: CorpusOptions | None = None  # for the texts of a target
    weights_at_run_time: bool = False  # whether other weights of the model may be loaded later
    adaptation: AdaptationOptions | None = None  # of a model that is a drafter only, on one device
    rank: Rank | None = None  # rank 0 of a tensor-parallel group, whose other ranks run elsewhere


def load_replica(spec: ReplicaSpec) -> tuple[Runner, LoopOptions]:
    """Load all that a replica's loop is made with. Errors as in `load_runner` and `load_with_heads`.

    In addition, raises ConfigError if a tokenizer can't be loaded.
    """
    model, colocated = spec.model, spec.colocated
    drafter: Runner | None
    heads: HeadProposer | None = None
    caches = 2 if spec.role == "both" else 1
    later = spec.role == "target"
    if spec.heads is not None:
        runner, drafter, heads = load_with_heads(model, spec.heads, colocated, caches=caches, practises_later=later)
    elif colocated is not None and spec.rank is None:
        runner, drafter = load_pair(model, colocated, practises_later=later)
    else:
        runner = load_runner(model, spec.rank, caches=caches, practises_later=later)
        drafter = None if colocated is None else load_runner(colocated)
    options = LoopOptions(
        prefill_chunk=model.prefill_chunk,
        load_tokenizer=lambda: structure_tokenizer(load_tokenizer(model.path, model.revision)),
        colocated=drafter,
        heads=heads,
        corpus=spec.corpus,
        weights=ReplaceableWeights(runner, model) if spec.weights_at_run_time else None,
        adaptation=None if spec.adaptation is None else make_adaptation(spec.adaptation, runner, model),
        draft_mappings=load_draft_mappings(colocated or model, spec.targets if colocated is None else [model]),
        logits_mappings=load_logits_mappings(model, spec.leaders),
    )
    return runner, options


class Replica:
    """A replica that other processes reach over ZeroMQ."""

    def __init__(self, spec: ReplicaSpec, host: str) -> None:
        """Load the model and start the loop. host: the address to listen on.

        Raises ConfigError if the model or a tokenizer can't be loaded, or doesn't fit into memory.
        """
        self._link = ReplicaZmqLink(spec.model.name, host)
        self.address = self._link.address
        self._loop: Loop
        self._adaptation: Adaptation | None = None
        self._thread = LoopThread(
            self._link.name, lambda: self._loop.turn(), self._link.wake, prepare=partial(self._load, spec)
        )
        try:
            self._thread.start()
        except BaseException:
            self._link.close()
            raise

    def _load(self, spec: ReplicaSpec) -> None:
        began_s = time.perf_counter()
        runner, options = load_replica(spec)
        loaded_s = time.perf_counter() - began_s
        stages.info("timing its steps")
        prefill_s = _estimate_prefill(runner, min(spec.model.prefill_chunk, runner.max_query))
        self._adaptation = options.adaptation
        # A turn that publishes new weights loads them.
        replaces = self._adaptation is not None or options.weights is not None
        self._thread.usual_turn_s = max(prefill_s, loaded_s) if replaces else prefill_s
        self._loop = make_loop(spec.role, runner, self._link, options)

    @property
    def times(self) -> LoopTimes:
        return self._loop.times

    @property
    def malformed(self) -> int:
        return self._link.malformed

    def check(self) -> None:
        """Raise UnavailableError if the loop has ended or is stuck."""
        self._thread.check()

    def report(self) -> Report:
        return self._loop.load()

    def drain(self, timeout_s: float) -> None:
        """Stop once no requests are left, or after `timeout_s`. Coordinators must not send new ones any more."""
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
        if self._adaptation is not None:
            self._adaptation.close()


def _estimate_prefill(runner: Runner, tokens: int) -> float:
    """Estimate the seconds of a prefill chunk, the longest work of a turn: on a CPU from a part, to start soon."""
    parts = _PREFILL_PARTS if runner.device.type == "cpu" else 1
    began_s = time.perf_counter()
    row = RowInput(slot=0, start=0, tokens=[0] * -(-tokens // parts), wanted=1)
    with few_threads(runner.model):
        runner.logits([row]).argmax(dim=-1).tolist()
    seconds = parts * (time.perf_counter() - began_s)
    runner.cache.clear_all()
    return seconds
