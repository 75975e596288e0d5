"""The distinct tokens of texts, with their counts in the answers, on a device: penalties need them in each step.

A text has a line of the table as long as its history lives, and only what has changed is sent. Must not know about
logits.
"""

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from weakref import ref

import numpy
import torch
from torch import Tensor

from decoding.sampling.history import History

_SPARE = 64  # entries of a line beyond those that its text needs, and a quarter of these
_ENTRY_BYTES = 12
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
