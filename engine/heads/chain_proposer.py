"""Drafts by a head of one layer, EAGLE-3 or MTP, whose keys and values are one more layer in the target's pages.

Column p holds the pair of the target's hidden state after token p and token p + 1. In a page that texts share, the last
column may be that of another next token: that can only cost acceptance.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.drafts.choices import RANKS, DraftChoice
from decoding.sampling import sampler
from decoding.sampling.params import SamplingParams
from decoding.sampling.transfer import tensor_on
from engine.heads.chain_graphs import ChainGraphs, ReadingGraphs, row_counts, token_counts
from engine.heads.proposer import ChainHead, DraftStart, HeadSampler, Reading
from engine.kernels.attention import RaggedBatch
from engine.kernels.native_replay import record_at_once, trace_few
from engine.kernels.operator_trace import MAX_TRACED_TOKENS, Example, log_failed_trace
from engine.layers.lora import LoraLayers
from engine.model.attention import Rows, running_over
from engine.model.cuda import GraphRecorder
from engine.model.cuda_graphs import usual_tokens
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput, pack_inputs, padding_row
from engine.model.runner import Runner
from engine.model.thread_choice import NARROW, on_one_thread

_LENGTH = 8  # tokens of a chain
_FEW_TOKENS = 16  # that a narrow head computes on one thread: others would be waited for longer than they help
_RECORDED_TOKENS = 5  # readings of one text of up to so many are recorded at the start


class _Traces(NamedTuple):
    """The head's parts without their Python."""

    read: Callable[..., Tensor]
    step: Callable[..., tuple[Tensor, Tensor]]


class _Graphs(NamedTuple):
    chain: ChainGraphs
    reader: ReadingGraphs
    recorder: GraphRecorder


class ChainProposer:
    """A `HeadProposer`. It drafts chains, and the alternatives to each token of a chain."""

    stepwise: bool = True
    chained: bool = True
    tree: Sequence[Sequence[int]] | None = None
    length: int = _LENGTH
    further_s: float = 0.0

    def __init__(self, head: ChainHead, runner: Runner, lora: LoraLayers | None = None) -> None:
        """
        runner: the target's, which keeps the hidden states that the head reads.
        lora: the adapters of the head's layers, in the slots of the target's; None: it takes none.
        """
        self.lora = lora
        self.kind = head.kind
        self._head, self._cache = head, runner.cache
        embedding = head.embed_tokens or runner.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        self._embedding = embedding
        self._device = next(head.parameters()).device
        self._outputs, self._is_narrow = head.outputs, head.hidden_size <= NARROW
        self._token_ids = None if self._outputs == runner.vocab_size else head.token_ids()
        self._traces: _Traces | None = None  # on a CPU
        # after each text's last pair, [slots + 1, H]; the last slot is for padding
        shape = runner.cache.slots + 1, head.hidden_size
        self._states = torch.zeros(shape, dtype=runner.model.dtype, device=self._device)
        self._graphs: _Graphs | None = None  # on a GPU
        if runner.recorder is not None:
            recorder = runner.recorder.sharing_pool()
            parts = head, self._output, recorder, self._states
            reader = ReadingGraphs(*parts, most_tokens=usual_tokens(runner.cache.slots, runner.max_query))
            self._graphs = _Graphs(ChainGraphs(*parts, length=_LENGTH, token_ids=self._token_ids), reader, recorder)

    def warm_up(self) -> None:
        """Do before the first draft what takes long: compile kernels, record graphs on a GPU, trace the head on a CPU.

        Pages must be allocated and free, because some are overwritten.
        """
        sampler.warm_up(self._device, self._outputs, self._token_ids)
        self._use_traces()
        if self._graphs is not None:
            self._add_pages()
            self._graphs.reader.warm_up()
            self._graphs.chain.warm_up()
            if self._graphs.recorder.error is not None:  # then padding would cost more than it gains
                self._graphs = None

    @torch.inference_mode()
    def _add_pages(self) -> None:
        """Let the cache have pages for the layer, which its first call adds."""
        tokens, positions, batch = pack_inputs([padding_row(self._cache.slots)]).copy_to(self._device).unpack()
        self._output(self._states[:1], tokens, positions, batch)

    @torch.inference_mode()
    def _use_traces(self) -> None:
        """Run few tokens on a CPU without the head's Python code, as `Runner.use_trace` does."""
        if self._device.type != "cpu":
            return
        with log_failed_trace(f"the {self.kind} head"):
            self._output(*self._example(1).inputs)  # the first call adds the layer's pages
            self._traces = _Traces(trace_few(self._read, self._reading), trace_few(self._step, self._example))
            if self._graphs is None:
                self._record()
        self._cache.clear_all()

    def _record(self) -> None:
        """Record usual calls, and time drafts, so that the first request's are as fast as later ones."""
        with record_at_once():
            for count in (*range(1, _RECORDED_TOKENS + 1), *[1] * 2):  # the second use of a recording checks it
                for _ in range(2):
                    self._run_reading(*self._reading(count).inputs)
            start = DraftStart(0, 1, SamplingParams(max_tokens=1))
            self.further_s = min([self._timed_draft([start]) for _ in range(4)])

    def _timed_draft(self, starts: Sequence[DraftStart]) -> float:
        self._draft(starts, 2, min(RANKS, self._outputs))
        return self.further_s

    def _example(self, count: int) -> Example:
        """Return a call of the layer with so many tokens of one row."""
        return self._example_of(count, self._head.hidden_size)

    def _reading(self, count: int) -> Example:
        """Return a reading of so many tokens of one row."""
        return self._example_of(count, self._head.feature_size)

    def _example_of(self, count: int, size: int) -> Example:
        row = RowInput(0, 1, range(count))
        self._cache.prepare_writes([(row.slot, row.start, row.end)])
        tokens, positions, batch = pack_inputs([row]).unpack()
        numbers = torch.randn(count, size, generator=torch.Generator().manual_seed(count))
        return Example((count,), (numbers.to(self._states), tokens, positions, batch))

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Run the head over new tokens, whose columns the target has just written."""
        readings = [reading for reading in readings if reading.following]
        if not readings:
            return
        rows = [RowInput(reading.slot, reading.start, reading.following) for reading in readings]
        layers_rows = [row for reading in readings for row in reading.layers_rows]
        adapters = self._adapters(readings, [len(row.tokens) for row in rows])
        self._cache.flush()
        if adapters is None and self._graphs is not None and self._graphs.reader.can_run(len(layers_rows)):
            self._graphs.reader.run(rows, layers_rows, hidden.layers)
            return
        features = hidden.layers[tensor_on(hidden.layers.device, layers_rows, torch.int64)].to(self._states)
        tokens, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        with self._adapted(adapters):
            outputs = self._run_reading(features, tokens, positions, batch, traced=adapters is None)  # [N, H]
        slots = tensor_on(self._device, [reading.slot for reading in readings], torch.int64)
        self._states[slots] = outputs[batch.offsets[1:] - 1]

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Draft a chain for each text. It writes to the columns after the last pair, which the target writes next."""
        ranks = min(ranks, self._outputs)
        if length > 1:
            self._cache.prepare_writes((start.slot, start.length - 1, start.length + length - 2) for start in starts)
        coupled = [start for start in starts if not start.params.rejects]
        if self._adapters(starts, [1] * len(starts)) is not None:
            return self._draft(starts, length, ranks)
        if self._graphs is None or not coupled or not self._graphs.chain.can_run(coupled, length, ranks):
            return self._draft(starts, length, ranks)
        began_s = time.perf_counter()
        chains = iter(self._graphs.chain.run(coupled, length))
        self.further_s = (time.perf_counter() - began_s) / length
        drawn = iter(self._draft([start for start in starts if start.params.rejects], length, ranks))
        return [next(drawn if start.params.rejects else chains) for start in starts]

    def _draft(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        if not starts:
            return []
        with self._few_threads(len(starts)):
            chooser = HeadSampler(starts, length, ranks, self._device, self._token_ids)
            hidden = self._states[tensor_on(self._device, [start.slot for start in starts], torch.int64)]  # [B, H]
            tokens = chooser.choose(self._head.logits(hidden))
            if length > 1:
                began_s = time.perf_counter()
                self._draft_further(chooser, starts, length, hidden, tokens)
                self.further_s = (time.perf_counter() - began_s) / (length - 1)
            return chooser.choices()

    def _draft_further(
        self, chooser: HeadSampler, starts: Sequence[DraftStart], length: int, hidden: Tensor, tokens: Tensor
    ) -> None:
        """Draft all tokens after the first. hidden: [B, H] after which these were chosen, [B]."""
        _, positions, batch = (
            pack_inputs([RowInput(start.slot, start.length - 1, [0]) for start in starts])
            .copy_to(self._device)
            .unpack()
        )
        adapters = self._adapters(starts, [1] * len(starts))
        for step in range(1, length):
            if step > 1:
                positions, batch = positions + 1, _next_column(batch)
            if adapters is None and self._traces is not None and len(hidden) <= MAX_TRACED_TOKENS:
                hidden, logits = self._traces.step(len(hidden), hidden, tokens[None], positions, batch)
            else:
                with self._adapted(adapters):
                    hidden, logits = self._step(hidden, tokens[None], positions, batch)
            tokens = chooser.choose(logits)

    def _run_reading(
        self, features: Tensor, tokens: Tensor, positions: Tensor, batch: RaggedBatch, *, traced: bool = True
    ) -> Tensor:
        with self._few_threads(len(features)):
            if not traced or self._traces is None or len(features) > MAX_TRACED_TOKENS:
                return self._read(features, tokens, positions, batch)
            return self._traces.read(len(features), features, tokens, positions, batch)

    def _few_threads(self, tokens: int) -> AbstractContextManager[None]:
        return on_one_thread(wanted=self._is_narrow and tokens <= _FEW_TOKENS)

    def _read(self, features: Tensor, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        """Return the layer's output, [N, H]. features: [N, F]. tokens: [1, N] that follow. positions: [1, N]."""
        return self._output(self._head.layer_input(features), tokens, positions, batch)

    def _step(self, hidden: Tensor, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> tuple[Tensor, Tensor]:
        """Return the layer's output, [N, H], and the logits after it, [N, W]. hidden: [N, H]."""
        output = self._output(hidden, tokens, positions, batch)
        return output, self._head.logits(output)

    def _adapters(self, texts: Sequence[Reading | DraftStart], counts: Sequence[int]) -> Tensor | None:
        """Return the slot of each token's adapter, [N] int64; None: no text has one of the head's.

        counts: the number of tokens of each text.
        """
        versions = ["", *(() if self.lora is None else self.lora.versions)]
        slots = [text.adapter if self.lora is not None and versions[text.adapter] else 0 for text in texts]
        if not any(slots):
            return None
        each = [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        return tensor_on(self._device, each, torch.int64)

    def _adapted(self, adapters: Tensor | None) -> AbstractContextManager[None]:
        return nullcontext() if adapters is None or self.lora is None else self.lora.applied(adapters)

    def _output(self, hidden: Tensor, tokens: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        embeddings = self._embedding(tokens).to(hidden)
        with running_over(Rows(batch, self._cache)):
            output: Tensor = self._head(hidden[None], embeddings, positions)
        return output[0]


def graph_count(slots: int, max_query: int) -> int:
    """Return the number of a head's CUDA graphs. The arguments are those of `Runner`."""
    return 2 * len(row_counts(slots)) + len(token_counts(usual_tokens(slots, max_query)))


def _next_column(batch: RaggedBatch) -> RaggedBatch:
    """Return the layout in which each row's only token comes a column later."""
    return batch._replace(
        lengths=batch.lengths + 1, columns=batch.columns + 1, positions=batch.positions + 1, trunks=batch.trunks + 1
    )
