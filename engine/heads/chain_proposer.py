"""Drafts by a head of one layer, EAGLE-3 or MTP, whose keys and values are one more layer in the target's pages.

Column p holds the pair of the target's hidden state after token p and token p + 1. In a page that texts share, the last
column may be that of another next token: that can only cost acceptance.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from decoding.drafts.choices import RANKS, DraftChoice
from decoding.sampling import sampler
from decoding.sampling.params import SamplingParams
from decoding.sampling.transfer import tensor_on
from engine.heads.chain_graphs import ChainGraphs, ReadingGraphs, Recorder
from engine.heads.proposer import ChainHead, DraftStart, HeadSampler, Reading
from engine.kernels.attention import RaggedBatch
from engine.kernels.call_recorder import CallRecorder
from engine.kernels.native import library
from engine.kernels.operator_trace import MAX_TRACED_TOKENS
from engine.layers.lora import LoraLayers
from engine.layers.rotary import use_native_angles
from engine.model.attention import Rows, running_over
from engine.model.cuda import graph_sizes
from engine.model.cuda_graphs import MAX_ROWS, usual_tokens
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput, pack_inputs, padding_row
from engine.model.runner import Runner
from engine.model.thread_choice import NARROW, on_one_thread

_log = logging.getLogger(__name__)
_LENGTH = 8  # tokens of a chain
_FEW_TOKENS = 16  # that a narrow head computes on one thread: others would be waited for longer than they help
_MAX_TOKENS = 1024  # of a recorded reading on a GPU
_MOST_ROWS = 16  # of recorded chains on a CPU
_TOLERANCE = 0.02  # of the largest number: rounding


class _AtOnce(NamedTuple):
    """The largest sizes that are recorded before the first draft. Others are when they are first used."""

    rows: int
    tokens: int


_USUAL = _AtOnce(rows=1, tokens=5)  # of one text


class _Graphs(NamedTuple):
    chain: ChainGraphs
    reader: ReadingGraphs
    recorder: Recorder
    at_once: _AtOnce


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
        # after each text's last pair, [slots + 1, H]; the last slot is for padding
        shape = runner.cache.slots + 1, head.hidden_size
        self._states = torch.zeros(shape, dtype=runner.model.dtype, device=self._device)
        self._graphs = self._new_graphs(runner)

    def _new_graphs(self, runner: Runner) -> _Graphs | None:
        recorder: Recorder
        if runner.recorder is not None:
            recorder, slots = runner.recorder.sharing_pool(), runner.cache.slots
            rows, tokens = row_counts(slots), token_counts(usual_tokens(slots, runner.max_query))
            at_once = _AtOnce(rows[-1], tokens[-1])
        elif self._device.type == "cpu" and library() is not None:
            recorder, at_once = CallRecorder(), _USUAL
            rows, tokens = recorder.sizes(_MOST_ROWS), recorder.sizes(MAX_TRACED_TOKENS)
            use_native_angles(self._head)
        else:
            return None
        parts = self._head, self._output, recorder, self._states
        chain = ChainGraphs(*parts, sizes=rows, length=_LENGTH, token_ids=self._token_ids)
        return _Graphs(chain, ReadingGraphs(*parts, sizes=tokens), recorder, at_once)

    def warm_up(self) -> None:
        """Do before the first draft what takes long: compile kernels, record usual calls, time a draft.

        Pages must be allocated and free, because some are overwritten.
        """
        sampler.warm_up(self._device, self._outputs, self._token_ids)
        if self._graphs is not None:
            self._add_pages()
            with self._few_threads(1):
                self._graphs.reader.warm_up(self._graphs.at_once.tokens)
                self._graphs.chain.warm_up(self._graphs.at_once.rows)
            is_native = isinstance(self._graphs.recorder, CallRecorder)
            if self._graphs.recorder.error is not None or (is_native and not self._repeats()):
                self._graphs = None  # padding would cost more than it gains
        if self._device.type == "cpu":
            self.further_s = min([self._timed_draft() for _ in range(3)])
        self._cache.clear_all()

    def _timed_draft(self) -> float:
        self.propose([DraftStart(0, 1, SamplingParams(max_tokens=1))], 2, RANKS)
        return self.further_s

    @torch.inference_mode()
    def _repeats(self) -> bool:
        """Whether recorded calls do what plain ones do. Decisions by the values of tensors would be frozen in them."""
        assert self._graphs is not None
        count, ranks = self._graphs.at_once.tokens, min(RANKS, self._outputs)
        features = torch.randn(count, self._head.feature_size, generator=torch.Generator().manual_seed(0))
        rows, features = [RowInput(0, 0, range(count))], features.to(self._states)
        self._cache.prepare_writes([(0, 0, count)])
        tokens, positions, batch = pack_inputs(rows).unpack()
        with self._few_threads(count):
            self._graphs.reader.run(rows, range(count), features)
            outputs = self._output(self._head.layer_input(features), tokens, positions, batch)
        start = DraftStart(0, count + 1, SamplingParams(max_tokens=1))
        chains = [self.propose([start], 4, ranks)[0], self._draft([start], 4, ranks)[0]]
        chosen = [[choice.tokens[0] for choice in chain] for chain in chains]
        state, expected = self._states[0], outputs[-1]
        if (state - expected).abs().max() <= _TOLERANCE * expected.abs().max() and chosen[0] == chosen[1]:
            return True
        _log.warning("recorded calls of the %s head do other things than plain ones, so it runs slower", self.kind)
        return False

    @torch.inference_mode()
    def _add_pages(self) -> None:
        """Let the cache have pages for the layer, which its first call adds."""
        tokens, positions, batch = pack_inputs([padding_row(self._cache.slots)]).copy_to(self._device).unpack()
        self._output(self._states[:1], tokens, positions, batch)

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
            with self._few_threads(len(layers_rows)):
                self._graphs.reader.run(rows, layers_rows, hidden.layers)
            return
        features = hidden.layers[tensor_on(hidden.layers.device, layers_rows, torch.int64)].to(self._states)
        tokens, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        with self._adapted(adapters), self._few_threads(len(layers_rows)):
            outputs = self._output(self._head.layer_input(features), tokens, positions, batch)  # [N, H]
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
        with self._few_threads(len(coupled)):
            self._graphs.chain.prepare(len(coupled))
            began_s = time.perf_counter()
            chains = iter(self._graphs.chain.run(coupled, length))
        if length > 1:
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
            with self._adapted(adapters):
                hidden = self._output(hidden, tokens[None], positions, batch)
            tokens = chooser.choose(self._head.logits(hidden))

    def _few_threads(self, tokens: int) -> AbstractContextManager[None]:
        return on_one_thread(wanted=self._is_narrow and tokens <= _FEW_TOKENS)

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


def row_counts(slots: int) -> list[int]:
    """Return the numbers of rows that have CUDA graphs."""
    return graph_sizes(min(slots, MAX_ROWS))


def token_counts(most: int) -> list[int]:
    """Return the numbers of tokens that have CUDA graphs."""
    return graph_sizes(min(most, _MAX_TOKENS))


def graph_count(slots: int, max_query: int) -> int:
    """Return the number of a head's CUDA graphs. The arguments are those of `Runner`."""
    return 2 * len(row_counts(slots)) + len(token_counts(usual_tokens(slots, max_query)))


def _next_column(batch: RaggedBatch) -> RaggedBatch:
    """Return the layout in which each row's only token comes a column later."""
    return batch._replace(
        lengths=batch.lengths + 1, columns=batch.columns + 1, positions=batch.positions + 1, trunks=batch.trunks + 1
    )
