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

_LEAST_WIDTH, _LEAST_LINES = 1024, 16


class Text:
    """A line of a table: the tokens of prompt and answer, in order of their first appearance."""

    def __init__(self, line: int, prompt: Sequence[int], vocab_size: int) -> None:
        """Tokens from `vocab_size` on do not count: a drafter may lack some."""
        self.line = line
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
    """A line for each of some texts. It grows with their number and length. For one thread."""

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)  # [lines, width]
        self.counts = torch.zeros(0, 0, device=device)  # [lines, width] float32
        self._vocab_size = vocab_size
        self._texts: dict[int, tuple[Text, ref[History]]] = {}  # by the identity of the history
        self._unsent: dict[int, Text] = {}  # by line
        self._free: list[int] = []
        self._ended: deque[int] = deque()  # identities of histories that are gone: any thread may end one

    @property
    def width(self) -> int:
        """The most tokens of a line."""
        return self.tokens.shape[1]

    def read(self, history: History) -> Text:
        """Return a history's line as it will be after `write`."""
        self._remove_ended()
        text, _ = self._texts.get(id(history)) or self._begin(history)
        text.catch_up(history.tokens)
        if text.unsent:
            self._unsent[text.line] = text
        return text

    def _begin(self, history: History) -> tuple[Text, ref[History]]:
        line = self._free.pop() if self._free else len(self._texts)
        text = Text(line, history.tokens[: history.prompt_length], self._vocab_size)
        entry = text, ref(history, partial(_append, self._ended, id(history)))
        self._texts[id(history)] = entry
        return entry

    def _remove_ended(self) -> None:
        """Free the lines of histories that are gone, before another can have the identity of one."""
        while self._ended:
            text, _ = self._texts.pop(self._ended.popleft())
            self._unsent.pop(text.line, None)
            self._free.append(text.line)

    def changes(self) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
        """Return what `write` needs: entries, [E] int64, their tokens, [E] int64, and their counts, [E] float32.

        They stay unsent until `write`, because memory may run out before.
        """
        texts = list(self._unsent.values())
        self._grow(len(self._texts) + len(self._free), max([len(text.index) for text in texts], default=0))
        sizes = [len(text.unsent) for text in texts]
        lines = numpy.array([text.line for text in texts], dtype=numpy.int64).repeat(sizes)
        indices = [text.index[token] for text in texts for token in text.unsent]
        return (
            lines * self.width + numpy.array(indices, dtype=numpy.int64),
            numpy.array([token for text in texts for token in text.unsent], dtype=numpy.int64),
            numpy.array([text.counts[token] for text in texts for token in text.unsent], dtype=numpy.float32),
        )

    def write(self, entries: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Apply `changes`, which are on the device now."""
        self.tokens.view(-1).index_copy_(0, entries, tokens)
        self.counts.view(-1).index_copy_(0, entries, counts)
        for text in self._unsent.values():
            text.unsent.clear()
        self._unsent.clear()

    def _grow(self, lines: int, width: int) -> None:
        """Make room, for more than is needed now."""
        old_lines, old_width = self.tokens.shape
        if lines <= old_lines and width <= old_width:
            return
        shape = [
            old if needed <= old else max(least, 1 << needed.bit_length())
            for needed, old, least in ((lines, old_lines, _LEAST_LINES), (width, old_width, _LEAST_WIDTH))
        ]
        tokens, counts = self.tokens.new_zeros(shape), self.counts.new_zeros(shape)
        tokens[:old_lines, :old_width], counts[:old_lines, :old_width] = self.tokens, self.counts
        self.tokens, self.counts = tokens, counts


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
