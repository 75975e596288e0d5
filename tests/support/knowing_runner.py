"""Replaces a drafter's `engine.model.runner.Runner`: no model, but it knows how the given texts continue.

Its logits depend only on the tokens in a slot's columns, so tests also see whether rows maintain these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.tokenizers.text_aligner import Speller
from engine.model.kv_pages import KVPages
from engine.model.ragged_batch import RowInput
from engine.model.runner import Runner

_SURE = 20.0


class KnowingRunner(Runner):
    """Continues known texts in a speller's tokens. After any other text all logits are equal."""

    def __init__(self, speller: Speller, texts: Sequence[bytes], *, slots: int = 16, max_length: int = 512) -> None:
        self.vocab_size = speller.vocabulary.size
        self.device = torch.device("cpu")
        self.single_device, self.trees_are_exact, self.recorder = False, True, None
        self.max_length, self.max_query = max_length, 256
        self.lora = None
        self.cache = KVPages(slots=slots, capacity=max_length + 256)
        self.columns = {slot: [-1] * self.cache.capacity for slot in range(slots)}  # the token in each
        self._speller = speller
        self._texts = [text.lstrip(b" ") for text in texts]  # tokenizers differ in leading spaces
        self._next: dict[bytes, int | None] = {}

    def logits(self, rows: Sequence[RowInput]) -> Tensor:
        """Return [n, V]: a high logit for the known next token, 0 for others."""
        logits: list[Tensor] = []
        for row in rows:
            columns = self.columns[row.slot]
            columns[row.start : row.end] = row.tokens
            for index in range(len(row.tokens) - row.logits_count, len(row.tokens)):
                path = range(row.start + index + 1) if row.paths is None else [*range(row.trunk), *row.paths[index]]
                logits.append(self._logits_after([columns[column] for column in path]))
        return torch.stack(logits) if logits else torch.zeros(0, self.vocab_size)

    def compact(self, slot: int, trunk: int, path: Sequence[int]) -> None:
        columns = self.columns[slot]
        columns[trunk : trunk + len(path)] = [columns[column] for column in path]

    def _logits_after(self, context: list[int]) -> Tensor:
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
