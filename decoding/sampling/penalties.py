"""Logit bias and penalties for tokens of the text before a position, draft tokens included.

They change the logits of P positions, [P, V] float32, in place. The distinct tokens of a text and their counts are in a
table on the device as long as its history lives, and only what has changed is sent.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple
from weakref import ref

import numpy
import torch
from torch import Tensor

from decoding.kernels.native import library, penalise_, restore_
from decoding.sampling.history import History, Positions
from decoding.sampling.transfer import Span, copy_all, find_spans

_SPARE = 64  # entries of a line beyond those that its text needs, and a quarter of these
TOKEN_BYTES = 38  # the most that a table takes for each token of its texts, beside `_SPARE`, also while its lines move


class Text:
    """A line of a table: the tokens of prompt and answer, in order of their first appearance."""

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        """Tokens from `vocab_size` on do not count: a drafter may lack some."""
        self.start, self.room = 0, 0  # the first entry of the line, and how many it may have
        known = dict.fromkeys(token for token in prompt if token < vocab_size)
        self.index = {token: index for index, token in enumerate(known)}  # in the line
        self.counts = Counter[int]()  # in the answer
        self.unsent = set(self.index)  # tokens whose entry on the device is out of date
        self._end, self._vocab_size = len(prompt), vocab_size

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Count what was added to the text. tokens: all of it."""
        for token in tokens[self._end :]:
            if token < self._vocab_size:
                self.index.setdefault(token, len(self.index))
                self.counts[token] += 1
                self.unsent.add(token)
        self._end = len(tokens)


class TextTable:
    """A line for each of some texts, each as long as its text needs, one after the other. For one thread."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(0, dtype=torch.int64, device=device)  # [U]
        self.counts = torch.zeros(0, device=device)  # [U] float32
        self._end = 0  # of the last line
        self._vocab_size = vocab_size
        self._texts: dict[int, tuple[Text, ref[History]]] = {}  # by the identity of the history
        self._unsent: dict[Text, None] = {}
        self._ended: deque[int] = deque()  # identities of histories that are gone: any thread may end one

    def read(self, history: History) -> Text:
        """Return a history's line; it has its place after `changes`, and its tokens after `write`."""
        self._remove_ended()
        text, _ = self._texts.get(id(history)) or self._begin(history)
        text.catch_up(history.tokens)
        if text.unsent:
            self._unsent[text] = None
        return text

    def _begin(self, history: History) -> tuple[Text, ref[History]]:
        text = Text(history.tokens[: history.prompt_length], self._vocab_size)
        entry = text, ref(history, partial(_append, self._ended, id(history)))
        self._texts[id(history)] = entry
        return entry

    def _remove_ended(self) -> None:
        """Forget histories that are gone, before another can have the identity of one."""
        while self._ended:
            text, _ = self._texts.pop(self._ended.popleft())
            self._unsent.pop(text, None)

    def changes(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return what `write` needs: entries, [E] int64, their tokens, [E] int64, and their counts, [E] float32.

        They stay unsent until `write`, because memory may run out before.
        """
        texts = list(self._unsent)
        self._make_room([text for text in texts if len(text.index) > text.room])
        sizes = [len(text.unsent) for text in texts]
        starts = numpy.array([text.start for text in texts], dtype=numpy.int64).repeat(sizes)
        indices = [text.index[token] for text in texts for token in text.unsent]
        return (
            starts + numpy.array(indices, dtype=numpy.int64),
            numpy.array([token for text in texts for token in text.unsent], dtype=numpy.int64),
            numpy.array([text.counts[token] for text in texts for token in text.unsent], dtype=numpy.float32),
        )

    def write(self, entries: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Apply `changes`, which are on the device now."""
        self.tokens.index_copy_(0, entries, tokens)
        self.counts.index_copy_(0, entries, counts)
        for text in self._unsent:
            text.unsent.clear()
        self._unsent.clear()

    def _make_room(self, texts: Sequence[Text]) -> None:
        """Give texts longer lines behind all others or, if there is no room, in new memory."""
        if not texts:
            return
        rooms = {text: len(text.index) + len(text.index) // 4 + _SPARE for text in texts}
        tokens, counts, end = self.tokens, self.counts, self._end
        if end + sum(rooms.values()) > len(tokens):
            rooms = {text: rooms.get(text, text.room) for text, _ in self._texts.values()}
            size, end = sum(rooms.values()), 0
            tokens, counts = tokens.new_zeros(size + size // 4), counts.new_zeros(size + size // 4)
        for text, room in rooms.items():
            tokens[end : end + text.room] = self.tokens[text.start : text.start + text.room]
            counts[end : end + text.room] = self.counts[text.start : text.start + text.room]
            text.start, text.room, end = end, room, end + room
        self.tokens, self.counts, self._end = tokens, counts, end


def _append(ended: deque[int], identity: int, history: ref[History]) -> None:
    ended.append(identity)


class TextTables:
    """The tables of a loop. There is usually one: a table is for one device and vocabulary."""

    def __init__(self) -> None:
        self._tables: dict[tuple[torch.device, int], TextTable] = {}

    def on(self, device: torch.device | str, vocab_size: int) -> TextTable:
        """Return the table on a device, without tokens from `vocab_size` on."""
        key = torch.device(device), vocab_size
        if key not in self._tables:
            self._tables[key] = TextTable(vocab_size, device)
        return self._tables[key]

    def clear(self) -> None:
        """Free the memory of all tables. Texts that are read again are sent again."""
        self._tables.clear()


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


class Entries(NamedTuple):
    """E pairs of a position and a token, with values."""

    rows: Tensor  # [E] int64, in 0…P−1
    tokens: Tensor  # [E] int64, in 0…V−1
    values: Tensor  # [E] float32


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
