"""Forbidden tokens of a position, given the text and the draft tokens before it.

Only `Bans` touches logits: it changes those of P positions, [P, V] float32, in place.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from decoding.sampling.history import Position
from decoding.sampling.token_lists import Entries, Span, TokenLists, TokenSet, find_spans
from decoding.sampling.transfer import copy_all


def repeated_ngrams(position: Position) -> Iterable[int]:
    """Return tokens that would repeat an n-gram of prompt or answer: transformers' `no_repeat_ngram_size`.

    Paulus et al., arXiv 1705.04304, section 2.5.
    """
    size = position.history.params.no_repeat_ngram_size
    if not size:
        return ()
    recent = position.tail(size - 1 + len(position.path))
    if len(recent) < size - 1:
        return ()
    prefix = recent[len(recent) - size + 1 :]
    banned = position.history.ngrams.continuations(tuple(prefix))
    in_path = [recent[end] for end in range(size - 1, len(recent)) if recent[end - size + 1 : end] == prefix]
    return [*banned, *in_path]


def bad_words(position: Position) -> Iterable[int]:
    """Return tokens that would complete a forbidden sequence of several tokens: `bad_words_ids`."""
    return position.history.bad_words.last_tokens(position)


def bad_tokens(position: Position) -> TokenSet:
    """Return the forbidden sequences of one token: `bad_words_ids`, without end-of-text tokens."""
    return position.history.bad_tokens


def early_end_tokens(position: Position) -> TokenSet | None:
    """Return all end tokens while the answer is shorter than `min_tokens`, as in vLLM."""
    return position.history.end_tokens if position.answer_length < position.history.params.min_tokens else None


def suppressed_tokens(position: Position) -> TokenSet:
    """Return `suppress_tokens`, as in transformers."""
    return position.history.suppressed


def begin_suppressed_tokens(position: Position) -> TokenSet | None:
    """Return `begin_suppress_tokens` at the answer's first token that is not forced, as in transformers."""
    first_free = 0 if position.history.params.forced_bos_token_id is None else 1
    return position.history.begin_suppressed if position.answer_length == first_free else None


@dataclass(frozen=True, slots=True, eq=False)
class Bans:
    """Sets the logits of tokens to −∞."""

    entries: Entries
    spans: Sequence[Span]

    @classmethod
    def build(
        cls,
        changing: Sequence[Callable[[Position], Iterable[int]]],
        lasting: Sequence[Callable[[Position], TokenSet | None]],
        positions: Sequence[Position],
        vocab_size: int,
        device: torch.device | str,
    ) -> "Bans | None":
        """Build from P positions; None if no token is forbidden.

        changing: functions above whose tokens depend on the text. lasting: those whose tokens the request names.
        """
        lists = TokenLists()
        for row, position in enumerate(positions):
            for kind in changing:
                lists.add(row, kind(position))
        sets = ([kind(position) for position in positions] for kind in lasting)
        spans = [span for kind_sets in sets for span in find_spans(kind_sets, vocab_size, device)]
        if not lists and not spans:
            return None
        return cls(Entries(*copy_all(device, [column.numpy() for column in lists.entries(vocab_size)])), spans)

    def apply_(self, logits: Tensor) -> None:
        """Change logits, [P, V], in place."""
        logits[self.entries.rows, self.entries.tokens] = -inf
        for start, end, tokens, _ in self.spans:
            logits[start:end].index_fill_(1, tokens, -inf)
