"""Logit bias and penalties for tokens of the text before a position, draft tokens included.

They change the logits of P positions, [P, V] float32, in place.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from decoding.kernels.native import library
from decoding.kernels.native_penalties import penalise_, restore_
from decoding.sampling.history import Positions
from decoding.sampling.token_lists import Entries, Span, TokenLists, find_spans
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

    tokens: Tensor  # [U] int64, the distinct tokens of the texts, one text after another
    counts: Tensor  # [U] float32, their counts in the answers
    shape: Tensor  # [2, N] int64: how many of them come before each position, and the first of them
    total: int  # the sum of shape[0]
    paths: Entries  # draft tokens before a position, with their counts, which replace those in the text
    settings: Tensor  # [3, N] float32: repetition, frequency, presence

    @classmethod
    def build(cls, requests: Sequence[Positions], vocab_size: int, device: torch.device | str) -> "Penalties | None":
        """Build from the positions of requests, N in all; None if none has any."""
        lists = _PenaltyLists()
        for request in requests:
            lists.add(request)
        return lists.penalties(vocab_size, device) if lists else None

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
        penalised -= frequency * counts
        penalised -= presence * (counts > 0)
        return penalised


class _PenaltyLists:
    """Gathers what penalties need of the positions of requests."""

    def __init__(self) -> None:
        self._tokens: list[array[int]] = []  # of each penalised text
        self._counts: list[array[float]] = []
        self._lengths: list[int] = []  # how many of them each request has
        self._size = 0  # N so far
        self._positions: list[int] = []  # the number of positions of each request
        self._settings: list[tuple[float, float, float]] = []  # of each request
        self._paths = TokenLists()

    def __bool__(self) -> bool:
        return any(self._lengths)

    def add(self, request: Positions) -> None:
        """Add a request, with penalties or without."""
        params, start = request.history.params, self._size
        if request.history.traits.is_penalised:
            tokens, counts = request.history.counts.of_text()
            self._tokens.append(tokens)
            self._counts.append(counts)
            if any(request.depths):
                paths = request.paths()
                for row, path, after in zip(count(start), paths, request.history.counts.after(paths), strict=False):
                    self._paths.add(row, path, after)
            self._lengths.append(len(tokens))
        else:
            self._lengths.append(0)
        self._size += len(request.depths)
        self._positions.append(len(request.depths))
        self._settings.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))

    def penalties(self, vocab_size: int, device: torch.device | str) -> Penalties:
        """Return the penalties as tensors on the device."""
        owners = torch.arange(len(self._lengths)).repeat_interleave(torch.tensor(self._positions))  # [N]
        tokens, counts, lengths = self._known(vocab_size)
        starts = lengths.cumsum(0) - lengths
        shape = torch.stack([lengths[owners], starts[owners]])  # [2, N]
        settings = torch.tensor(self._settings)[owners].T.contiguous()  # [3, N]
        total = int(shape[0].sum())
        paths = self._paths.entries(vocab_size)
        tokens, counts, shape, settings, *entries = copy_all(device, [tokens, counts, shape, settings, *paths])
        return Penalties(tokens, counts, shape, total, Entries(*entries), settings)

    def _known(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens below `vocab_size`, their counts, and how many each request has: a drafter may lack some."""
        tokens = torch.frombuffer(bytearray().join(self._tokens), dtype=torch.int64)
        counts = torch.frombuffer(bytearray().join(self._counts), dtype=torch.float32)
        lengths = torch.tensor(self._lengths)
        known = tokens < vocab_size
        if known.all():
            return tokens, counts, lengths
        owners = torch.arange(len(lengths)).repeat_interleave(lengths)
        return tokens[known], counts[known], owners[known].bincount(minlength=len(lengths))
