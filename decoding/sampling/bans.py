"""Forbidden tokens of a position, which depend on the text before it, draft tokens included.

Only `Bans` touches logits: [P, V] float32 of P positions, in place.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from decoding.sampling.history import Position
from decoding.sampling.token_lists import Entries, Span, TokenLists, TokenSet, spans


def repeated_ngrams(position: Position) -> Iterable[int]:
    """Return tokens that would repeat an n-gram of prompt or answer: `no_repeat_ngram_size` of transformers.

    Paulus et al., arXiv 1705.04304, section 2.5.
    """
    size = position.history.params.no_repeat_ngram_size
    if not size:
        return ()
    recent = position.tail(size - 1 + len(position.path))
    if len(recent) < size - 1:
        return ()
    prefix = recent[len(recent) - size + 1 :]
    banned = position.history.ngrams.attached_drafters(tuple(prefix))
    in_path = [recent[end] for end in range(size - 1, len(recent)) if recent[end - size + 1 : end] == prefix]
    return [*banned, *in_path]


def bad_words(position: Position) -> Iterable[int]:
    """Yield the last token of each forbidden sequence whose other tokens come just before: `bad_words_ids`.

    Those of one token are `bad_tokens`.
    """
    return position.history.bad_words.completing(position)


def bad_tokens(position: Position) -> TokenSet:
    """Forbidden sequences of one token. An end-of-text token alone is no bad word."""
    return position.history.bad_tokens


def early_ends(position: Position) -> TokenSet | None:
    """End tokens of every kind, as long as the answer is shorter than `min_tokens`, as vLLM has it."""
    return position.history.ends if position.answer_length < position.history.params.min_tokens else None


def suppressed(position: Position) -> TokenSet:
    """`suppress_tokens`, as in transformers."""
    return position.history.suppressed


def suppressed_at_first(position: Position) -> TokenSet | None:
    """`begin_suppress_tokens` at the answer's first token that is not forced.

    As in transformers; `decoding.sampling.constraints.forced_token` says which tokens are forced.
    """
    first_free = 0 if position.history.params.forced_bos_token_id is None else 1
    return position.history.suppressed_at_first if position.answer_length == first_free else None


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
        """Of these kinds, whose tokens depend on the text or on the request alone; None if no position has any."""
        lists = TokenLists()
        for place, position in enumerate(positions):
            for kind in changing:
                lists.add(place, kind(position))
        named = [spans([kind(position) for position in positions], vocab_size, device) for kind in lasting]
        found = [span for each in named for span in each]
        return cls(lists.entries(vocab_size, device), found) if lists or found else None

    def apply_(self, logits: Tensor) -> None:
        """logits: [P, V]"""
        logits[self.entries.rows, self.entries.tokens] = -inf
        for start, end, tokens, _ in self.spans:
            logits[start:end].index_fill_(1, tokens, -inf)
