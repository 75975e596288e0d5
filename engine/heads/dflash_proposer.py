"""Drafts of a DFlash head, whose keys and values are further layers in the target's pages.

Column p holds what the layers see of the target's hidden states after token p, once these were read. A block is written
to the columns after those, where the target writes next.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from decoding.drafts.choices import DraftChoice
from decoding.sampling import sampler
from decoding.sampling.transfer import tensor_on
from engine.heads.dflash import DFlashHead, layer_window
from engine.heads.proposer import DraftStart, HeadProposer, HeadSampler, Reading
from engine.heads.spec import HeadsKind
from engine.kernels.attention import RaggedBatch
from engine.kernels.native_replay import trace_few
from engine.kernels.operator_trace import MAX_TRACED_TOKENS, Example, log_failed_trace
from engine.layers.rotary import NativeRotary
from engine.model.attention import Rows, attend_to_pages, running_over
from engine.model.hidden_states import HiddenStates
from engine.model.ragged_batch import RowInput, pack_inputs
from engine.model.runner import Runner

MOST_LOGITS = 1 << 25  # in memory at a time
_rotate_keys = NativeRotary(apply_rotary_pos_emb)


class DFlashProposer(HeadProposer):
    """All entries of a block are drafted at once, so any candidate may follow any.

    In DSpark heads an entry also depends on the token before: candidates follow the best ones.
    """

    kind: HeadsKind = "dflash"

    def __init__(self, head: DFlashHead, runner: Runner) -> None:
        """head: with `join_context`. runner: the target's, which keeps the hidden states that the head reads."""
        output_layer = runner.model.get_output_embeddings()
        assert output_layer is not None
        head.share_output(output_layer)
        self._head, self._cache = head, runner.cache
        self.length = head.config.length
        self.chained = head.markov_head is not None
        embedding = head.embed_tokens or runner.model.get_input_embeddings()
        assert isinstance(embedding, nn.Module)
        self._embedding = embedding
        self._device, self._dtype = head.hidden_norm.weight.device, runner.model.dtype
        outputs = head.config.outputs
        self._outputs = outputs
        self._token_ids = None if outputs == runner.vocab_size else head.token_ids()
        self._anchors = [0] * runner.cache.slots  # the last token of each slot's text that was read
        self._read_few: Callable[..., Tensor] | None = None  # a trace of `_write`, and one of `_hidden`
        self._run_few: Callable[..., Tensor] | None = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels, and trace the head on a CPU."""
        sampler.warm_up(self._device, self._outputs, self._token_ids)
        self._write(*self._context_example(1).inputs)  # the first call adds the layers' pages
        self._hidden(*self._block_example(1).inputs)
        if self._device.type == "cpu":
            with log_failed_trace(f"the {self.kind} head"):
                self._read_few = trace_few(self._write, self._context_example)
                self._run_few = trace_few(self._hidden, self._block_example)
        self._cache.clear_all()

    @torch.inference_mode()
    def read(self, readings: Sequence[Reading], hidden: HiddenStates) -> None:
        """Write the layers' keys and values of new tokens, whose columns the target has just written."""
        readings = [reading for reading in readings if reading.following]
        if not readings:
            return
        rows = [RowInput(reading.slot, reading.start, reading.following) for reading in readings]
        layers_rows = [row for reading in readings for row in reading.layers_rows]
        self._cache.flush()
        features = hidden.layers[tensor_on(hidden.layers.device, layers_rows, torch.int64)]
        _, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        inputs = features.to(self._device, self._dtype), positions, _seeing_one(batch)
        if self._read_few is None or len(features) > MAX_TRACED_TOKENS:
            self._write(*inputs)
        else:
            self._read_few(len(features), *inputs)
        for reading in readings:
            self._anchors[reading.slot] = reading.following[-1]

    @torch.inference_mode()
    def propose(self, starts: Sequence[DraftStart], length: int, ranks: int) -> list[list[DraftChoice]]:
        """Draft a block for each text. It writes to the columns after the text, which the target writes next."""
        chooser = HeadSampler(starts, length, min(ranks, self._outputs), self._device, self._token_ids)
        hidden = self.hidden(starts, length).transpose(0, 1)  # [length, B, H]
        parts = hidden.split(max(MOST_LOGITS // (len(starts) * self._outputs), 1))
        if self._head.markov_head is None:
            for part in parts:
                chooser.choose_steps(self._head.logits(part))
        else:
            self._follow(chooser, parts, [self._anchors[start.slot] for start in starts])
        return chooser.choices()

    def _follow(self, chooser: HeadSampler, parts: Sequence[Tensor], anchors: Sequence[int]) -> None:
        """Choose tokens that depend on those before. parts: [·, B, H] entries in order."""
        markov = self._head.markov_head
        assert markov is not None
        tokens, state = tensor_on(self._device, anchors, torch.int64), markov.start(parts[0][0])
        for part in parts:
            for entry, raw in zip(part, self._head.raw_logits(part), strict=True):
                bias, state = markov(tokens, entry, state)
                tokens = chooser.choose(self._head.bounded(raw + bias))

    def hidden(self, starts: Sequence[DraftStart], length: int) -> Tensor:
        """Run blocks, and return the entries that draft each text's next `length` tokens, [B, length, H]."""
        count = self._head.config.entries(length)
        masks = [self._head.config.mask_token_id] * (count - 1)
        rows = [RowInput(start.slot, start.length - 1, [self._anchors[start.slot], *masks]) for start in starts]
        self._cache.prepare_writes((row.slot, row.start, row.end) for row in rows)
        tokens, positions, batch = pack_inputs(rows).copy_to(self._device).unpack()
        inputs = tokens, positions, batch, _seeing_all(batch)
        if self._run_few is None or tokens.numel() > MAX_TRACED_TOKENS:
            hidden = self._hidden(*inputs)
        else:
            hidden = self._run_few(tokens.numel(), *inputs)
        return hidden.view(len(rows), count, -1)[:, count - length :]

    def _write(self, features: Tensor, positions: Tensor, batch: RaggedBatch) -> Tensor:
        """Write the context's keys and values. features: [N, F]. positions: [1, N]. Return what nobody needs."""
        head, written = self._head, features
        context = head.context(features[None])
        rotary = head.rotary_emb(context, position_ids=positions)
        parts = head.context_parts(context)
        with running_over(Rows(batch, self._cache)):
            for layer, (keys, values) in zip(head.layers, parts, strict=True):
                attention: Any = layer.self_attn
                keys = attention.k_norm(keys).transpose(1, 2)
                keys, _ = _rotate_keys(keys, keys, *rotary)
                window = layer_window(layer)
                written, _ = attend_to_pages(attention, keys, keys, values.transpose(1, 2), None, sliding_window=window)
        return written

    def _hidden(self, tokens: Tensor, positions: Tensor, causal: RaggedBatch, both_ways: RaggedBatch) -> Tensor:
        """Return what the head's `logits` takes, [N, H]. tokens, positions: [1, N], of blocks."""
        head = self._head
        hidden = self._embedding(tokens).to(self._dtype) * head.config.embedding_scale
        rotary = head.rotary_emb(hidden, position_ids=positions)
        for index, layer in enumerate(head.layers):
            batch = causal if head.is_causal(index) else both_ways
            with running_over(Rows(batch, self._cache)):
                hidden = layer(hidden, position_embeddings=rotary)
        normed: Tensor = head.norm(hidden)
        return normed[0]

    def _context_example(self, count: int) -> Example:
        """Return a reading of so many tokens of one row."""
        row = RowInput(0, 1, range(count))
        self._cache.prepare_writes([(row.slot, row.start, row.end)])
        _, positions, batch = pack_inputs([row]).copy_to(self._device).unpack()
        features = torch.randn(count, self._head.config.feature_size, generator=torch.Generator().manual_seed(count))
        return Example((count,), (features.to(self._device, self._dtype), positions, _seeing_one(batch)))

    def _block_example(self, count: int) -> Example:
        """Return a block of so many tokens of one row."""
        row = RowInput(0, 1, range(count))
        self._cache.prepare_writes([(row.slot, row.start, row.end)])
        tokens, positions, batch = pack_inputs([row]).copy_to(self._device).unpack()
        return Example((count,), (tokens, positions, batch, _seeing_all(batch)))


def _seeing_one(batch: RaggedBatch) -> RaggedBatch:
    """Return the layout in which tokens see their row's first column only: they are written, and attend to nothing."""
    return batch._replace(positions=torch.zeros_like(batch.positions), trunks=torch.ones_like(batch.trunks))


def _seeing_all(batch: RaggedBatch) -> RaggedBatch:
    """Return the layout in which tokens see all columns of their row."""
    ends = batch.lengths[batch.row_of]
    return batch._replace(positions=ends - 1, trunks=ends)
