"""Stands in for a drafter's `actors.model.runner.Runner`: no model, but it knows how the texts go on.

What it answers depends on the tokens in a slot's columns alone, so it also shows whether a row keeps them right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.model.forward_input import RowInput
from actors.model.kv_slots import SlotCache
from actors.model.runner import Runner
from decoding.tokenizers.text_aligner import Speller

_SURE = 20.0


class KnowingRunner(Runner):
    """Writes the known texts in the tokens of a speller; after any other text it knows nothing."""

    def __init__(self, speller: Speller, texts: Sequence[bytes], *, slots: int = 16, max_length: int = 512) -> None:
        self.vocab_size = speller.vocabulary.size
        self.device = torch.device("cpu")
        self.max_length, self.max_query = max_length, 256
        self.cache = SlotCache(slots=slots, capacity=max_length + 256)
        self.columns = {slot: [-1] * self.cache.capacity for slot in range(slots)}  # the token in each
        self._speller = speller
        self._texts = [text.lstrip(b" ") for text in texts]  # tokenizers differ in the spaces before a text
        self._next: dict[bytes, int | None] = {}

    def logits(self, rows: Sequence[RowInput], *, last_only: bool = False) -> Tensor:
        """[N or B, V], one value for what comes next and another for all else."""
        found: list[Tensor] = []
        for row in rows:
            columns = self.columns[row.slot]
            columns[row.start : row.end] = row.tokens
            for at in [len(row.tokens) - 1] if last_only else range(len(row.tokens)):
                path = range(row.start + at + 1) if row.paths is None else [*range(row.trunk), *row.paths[at]]
                found.append(self._after([columns[column] for column in path]))
        return torch.stack(found)

    def compact(self, slot: int, trunk: int, path: Sequence[int]) -> None:
        columns = self.columns[slot]
        columns[trunk : trunk + len(path)] = [columns[column] for column in path]

    def _after(self, context: list[int]) -> Tensor:
        data = self._speller.vocabulary.decode_bytes(context).lstrip(b" ")
        if data not in self._next:
            rests = [text[len(data) :] for text in self._texts if text.startswith(data)]
            self._next[data] = self._first(rests[0]) if rests else None
        token = self._next[data]
        logits = torch.zeros(self.vocab_size)
        if token is not None:
            logits[token] = _SURE
        return logits

    def _first(self, rest: bytes) -> int | None:
        try:
            tokens = self._speller.encode_continuation(rest.decode())
        except UnicodeDecodeError:  # within a character
            tokens = self._speller.spell_bytes(rest[:1])
        return tokens[0] if tokens else self._speller.vocabulary.ids.get("eos")
