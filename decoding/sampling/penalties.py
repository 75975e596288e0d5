"""Logit bias and penalties for tokens of the text before a position, draft tokens included.

They change the logits of P positions, [P, V] float32, in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy
import torch
from torch import Tensor

from decoding.kernels.native import library
from decoding.kernels.native_penalties import penalise_, restore_
from decoding.sampling.history import Positions
from decoding.sampling.text_table import Text, TextTables
from decoding.sampling.token_lists import Entries, Span, find_spans
from decoding.sampling.transfer import copy_all


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """Adds a bias to tokens' logits: OpenAI's `logit_bias`, or transformers' `sequence_bias` of single tokens.

    If a request names a token twice, the later bias counts.
    """

    spans: Sequence[Span]

    @classmethod
    def build(cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str) -> "LogitBias | None":
        """Build from the positions of requests; None if none has any."""
        if not any(request.history.params.logit_bias for request in requests):
            return None
        sets = [request.history.biases for request in requests for _ in request.depths]
        spans = list(find_spans(sets, vocab_size, device))
        return cls(spans) if spans else None

    def apply_(self, logits: Tensor) -> Sequence[Tensor]:
        """Change logits, [N, V], in place. Returns what `undo_` needs."""
        before = [logits[start:end, tokens] for start, end, tokens, _ in self.spans]
        for (start, end, tokens, values), values_before in zip(self.spans, before, strict=True):
            logits[start:end, tokens] = values_before + values
        return before

    def undo_(self, logits: Tensor, before: Sequence[Tensor]) -> None:
        """Restore logits, [N, V], in place."""
        for (start, end, tokens, _), values_before in zip(self.spans, before, strict=True):
            logits[start:end, tokens] = values_before


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """Repetition, frequency and presence penalty, in this order.

    The repetition penalty applies to tokens of prompt and answer, as in transformers and vLLM: it multiplies logits
    below 0 and divides others (Keskar et al., arXiv 1909.05858, section 4.1). The other two apply to tokens of the
    answer, as in vLLM and OpenAI's API: logit − frequency × count − presence × (count > 0).
    """

    tokens: Tensor  # [U] int64, the distinct tokens of texts, among others
    counts: Tensor  # [U] float32, their counts in the answers
    shape: Tensor  # [2, N] int64: how many of them come before each position, and the index of the first
    total: int  # the sum of shape[0]
    paths: Entries  # draft tokens before a position, with their counts, which replace those in the text
    settings: Tensor  # [3, N] float32: repetition, frequency, presence
    counts_matter: bool  # whether any of the last two is not 0

    @classmethod
    def build(
        cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str, tables: TextTables
    ) -> "Penalties | None":
        """Build from the positions of requests, N in all; None if none has any. The next `build` invalidates it.

        tables: of the requests' texts, as far as earlier calls read them.
        """
        if not any(request.history.traits.is_penalised for request in requests):
            return None
        table = tables.on(device, vocab_size)
        texts = [table.read(request.history) if request.history.traits.is_penalised else None for request in requests]
        changes = table.changes()
        counts = [len(request.depths) for request in requests]
        # [B, 2]: the length of each text's line, and where it begins
        lines = numpy.array([(len(text.index), text.start) if text else (0, 0) for text in texts])
        settings = numpy.array([request.history.penalties for request in requests], numpy.float32)  # [B, 3]
        shape, settings = lines.T.repeat(counts, axis=1), settings.T.repeat(counts, axis=1)  # [2, N], [3, N]
        parts = [shape, settings, *_count_paths(requests, texts, vocab_size)]
        *changes_there, shape_there, settings_there, rows, tokens, values = copy_all(device, [*changes, *parts])
        table.write(*changes_there)
        return cls(
            table.tokens,
            table.counts,
            shape_there,
            int(shape[0].sum()),
            Entries(rows, tokens, values),
            settings_there,
            bool(settings[1:].any()),
        )

    def apply_(self, logits: Tensor) -> Sequence[Tensor]:
        """Change logits, [N, V], in place. Returns what `undo_` needs."""
        of_paths = logits[self.paths.rows, self.paths.tokens]
        if self._is_native(logits):
            texts = [penalise_(logits, self.shape, self.tokens, self.counts, self.settings, self.total)]
        else:
            rows, tokens, counts = self._spread()
            texts = [logits[rows, tokens], rows, tokens]
            logits[rows, tokens] = self._penalise(texts[0], rows, counts)
        logits[self.paths.rows, self.paths.tokens] = self._penalise(of_paths, self.paths.rows, self.paths.values)
        return [of_paths, *texts]

    def undo_(self, logits: Tensor, before: Sequence[Tensor]) -> None:
        """Restore logits, [N, V], in place."""
        of_paths, of_texts, *entries = before
        logits[self.paths.rows, self.paths.tokens] = of_paths
        if entries:
            logits[entries[0], entries[1]] = of_texts
        else:
            restore_(logits, self.shape, self.tokens, of_texts)

    def _is_native(self, logits: Tensor) -> bool:
        return logits.device.type == "cpu" and logits.is_contiguous() and library() is not None

    def _spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return a position, a token before it and its count, each [total]."""
        lengths, firsts = self.shape
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths, output_size=self.total)
        shifts = firsts - lengths.cumsum(0) + lengths  # [N]
        index = torch.arange(self.total, device=lengths.device) + shifts[rows]
        return rows, self.tokens[index], self.counts[index]

    def _penalise(self, logits: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the new logits of tokens, [E]. All: [E]."""
        repetition, frequency, presence = self.settings[:, rows]
        penalised = torch.where(logits < 0, logits * repetition, logits / repetition)
        if self.counts_matter:
            penalised -= frequency * counts
            penalised -= presence * (counts > 0)
        return penalised


def _count_paths(
    requests: Sequence[Positions], texts: Sequence[Text | None], vocab_size: int
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Return `Entries`: draft tokens before each position of penalised texts, with their counts in answer and draft."""
    tokens: list[int] = []
    in_answer: list[int] = []
    depths: list[int] = []  # [N] how many of them are before each position
    for request, text in zip(requests, texts, strict=True):
        if text is None or not any(request.depths):
            depths += [0] * len(request.depths)
            continue
        path_tokens = [*chain.from_iterable(request.paths())]
        tokens += path_tokens
        in_answer += map(text.counts.__getitem__, path_tokens)
        depths += request.depths
    rows, ids = numpy.arange(len(depths)).repeat(depths), numpy.array(tokens, numpy.int64)  # [E]
    # The same token may be in a draft twice.
    _, first, times = numpy.unique(rows * (ids.max(initial=0) + 1) + ids, return_inverse=True, return_counts=True)
    counts = (numpy.array(in_answer, numpy.int64) + times[first]).astype(numpy.float32)
    known = ids < vocab_size
    return rows[known], ids[known], counts[known]
